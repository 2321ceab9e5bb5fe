"""Attention backends: how a step's queries meet the paged keys and values."""
