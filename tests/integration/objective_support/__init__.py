"""Runs of recorded rollouts in one process, with every update recomputed in float64 beside the real one."""
