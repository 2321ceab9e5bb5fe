"""From logits to tokens: parameters of a sequence, processing, selection, draws, log-probabilities."""
