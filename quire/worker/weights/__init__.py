"""Weights: where tensors come from (sources), how a model is filled with them, and where packed ones are kept."""
