"""Where users come in: the `LLM` class and the command line (a server later). Nothing below imports this room."""
