"""Where users come in: the `LLM` class, the command line and the server. Nothing below imports this room."""
