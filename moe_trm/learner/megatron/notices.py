"""Notices of Megatron-Core and torch that users of this learner can do nothing about."""

from __future__ import annotations

import warnings

import torch

KNOWN = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"full scope is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor",
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
    r"`torch\.distributed\.\w+` is deprecated",
    r"invalid escape sequence",
)
"""Harmless warnings of Megatron-Core.

They are about replacements for missing GPU libraries, a default of its own configuration, experts that tensor
parallelism leaves whole, its optimizer's shards, its collectives, and the spelling of a docstring.
"""


CUDA_ONLY = (
    r"When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS"
)
"""Good advice, where there is such a device."""


def silence_known_notices() -> None:
    """Ignore the `KNOWN` warnings in this process from now on; every other warning stays.

    Call it before Megatron is imported.
    """
    for message in KNOWN if torch.cuda.is_available() else (*KNOWN, CUDA_ONLY):
        warnings.filterwarnings("ignore", message=message)
