"""Structured output: what a request's tokens may be, worked out while the device computes. No tensors, no queues."""
