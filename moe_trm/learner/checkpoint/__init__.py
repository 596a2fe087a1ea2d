"""Checkpoints of a run: complete, verified, independent of the parallel layout, and never pickle."""
