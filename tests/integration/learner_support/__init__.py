"""Common parts of the learner's integration tests: a tiny checkpoint, micro-batches, and a way to run ranks."""
