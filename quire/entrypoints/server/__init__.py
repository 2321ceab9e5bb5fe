"""The OpenAI-compatible HTTP server; the one home of web libraries."""
