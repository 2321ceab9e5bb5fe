"""Drafts: tokens proposed ahead of the model, one proposer a file."""
