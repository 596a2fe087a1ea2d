"""Evaluation of the weights that a run left, on held-out prompts, without training."""
