"""What sets rollout engine, trainer and checkpoint of anybody's run apart, from a dump of it."""
