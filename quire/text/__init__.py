"""Tokens and text: tokenizers, incremental decoding, chat templates. Imports no torch; knows no engine."""
