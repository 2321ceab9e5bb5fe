"""Parsers: from a model's text to what it means, one model format a file."""
