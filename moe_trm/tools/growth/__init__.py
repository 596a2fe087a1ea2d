"""Causes of a mismatch that grew between two checkpoints of a run (`moe-trm doctor RUN --grown STEP STEP`)."""
