"""Why the mismatch of a run grew between two of its checkpoints (`moe-trm doctor RUN --grown STEP STEP`)."""
