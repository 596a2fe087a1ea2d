"""What the learner's integration tests share: a tiny checkpoint, micro-batches, and a way to run ranks."""
