"""Generators of random numbers by name."""


class CudaRNGStatesTracker:
    """Megatron-Core has its own unless it is asked for this one."""


class activation_recompute_forward:  # noqa: N801 (its name there)
    """Entered in recomputations with 8-bit products alone."""
