"""The paged KV cache's books: which block belongs to whom, and which holds what. Imports nothing below the base."""
