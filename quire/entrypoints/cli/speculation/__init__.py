"""`quire bench spec`: what speculative decoding gains, by method, number of drafts and batch."""
