"""Where a worker computes: one kind of device a file."""
