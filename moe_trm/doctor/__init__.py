"""Is this run going to work: environment, checkpoint, one real request, and a probe of both engines at the same weights."""
