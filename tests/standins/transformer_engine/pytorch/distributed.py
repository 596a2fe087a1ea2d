"""Generators of random numbers by name."""


class CudaRNGStatesTracker:
    """Megatron-Core uses its own unless it is configured to use this one."""


class activation_recompute_forward:  # noqa: N801 (its name there)
    """Entered in recomputations with 8-bit products alone."""
