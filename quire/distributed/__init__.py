"""What the ranks of a group share: where they meet and what they gather there. Layers and workers use it."""
