"""Notices of Megatron-Core and torch that users of this learner can do nothing about."""

from __future__ import annotations

import warnings

KNOWN = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"full scope is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor",
    r"`torch\.distributed\.\w+` is deprecated",
)
"""What missing GPU libraries are replaced by, a default of Megatron's own configuration, its optimizer's shards, its collectives."""


def silence_known_notices() -> None:
    """Ignore the `KNOWN` warnings in this process from now on; every other warning stays. Call it before Megatron is imported."""
    for message in KNOWN:
        warnings.filterwarnings("ignore", message=message)
