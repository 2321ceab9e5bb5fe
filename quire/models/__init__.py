"""The model families: one file each, composed from `quire.layers`."""
