"""Small helpers that belong to no room; import the modules themselves."""
