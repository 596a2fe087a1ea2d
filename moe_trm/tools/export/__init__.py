"""Hugging Face folders made of the checkpoints of a run."""
