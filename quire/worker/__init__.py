"""The worker: device, memory, weights, the model runner and its rows."""
