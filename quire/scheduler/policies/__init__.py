"""Scheduling policies, one module each; `registry` knows them by name."""
