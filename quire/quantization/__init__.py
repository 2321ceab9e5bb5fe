"""Weight formats: how a linear layer's weights are stored, loaded and multiplied."""
