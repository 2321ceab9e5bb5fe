"""Dialects: each reads one API's bodies and writes what comes of a turn in its form, one API a file."""
