"""The engine: add requests, step, turn tokens into outputs."""
