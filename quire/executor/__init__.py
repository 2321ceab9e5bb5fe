"""Executors: how a step reaches the workers; they differ only in transport."""
