"""Adapters (LoRA, virtual tokens): how a request names one, what its files say, and its place in a model's layers."""
