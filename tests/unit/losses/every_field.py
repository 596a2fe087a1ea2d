"""Everything that any loss reads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_trm.losses import LossInputs


def with_every_field(inputs: LossInputs, reference_logprobs: Tensor) -> LossInputs:
    """`inputs` of pairs of rows, the first of each right."""
    rows = torch.arange(len(inputs.keep))
    return replace(
        inputs,
        rewards=1.0 - rows % 2,
        group_ids=rows // 2,
        entropy=torch.ones(inputs.keep.shape),
        router_shift=torch.full(inputs.keep.shape, 0.1),
        reference_logprobs=reference_logprobs,
    )
