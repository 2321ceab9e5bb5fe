"""The layers that models are composed of; parameters and shapes here, arithmetic in `quire.ops`."""
