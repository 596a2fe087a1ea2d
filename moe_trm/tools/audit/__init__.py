"""The audit of anybody's run from a dump of it: the differences between rollout engine, trainer and checkpoint."""
