"""What the engine counts and times; imports no row."""
