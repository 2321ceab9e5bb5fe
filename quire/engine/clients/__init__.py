"""How a front end reaches the engine core: in a thread of this process, or in a process of its own."""
