"""Packed tokens are those that boolean indexing gives, whatever the mask looks like."""

from __future__ import annotations

import pytest
import torch

from moe_trm.methods.packing import Packing
from moe_trm.ratios import LogRatios

GEN = torch.Generator().manual_seed(0)
MASKS = {
    "answers": torch.arange(200) < torch.tensor([[200], [0], [1], [77]]),
    "after prompts": (torch.arange(300) >= 20) & (torch.arange(300) < torch.tensor([[300], [64], [150]])),
    "tool outputs": torch.rand(40, 300, generator=GEN) < 0.995,
    "scattered": torch.rand(50, 70, generator=GEN) < 0.5,
    "full": torch.ones(3, 40, dtype=torch.bool),
    "empty": torch.zeros(3, 4, dtype=torch.bool),
    "one column": torch.rand(9, 1, generator=GEN) < 0.5,
    "no columns": torch.ones(3, 0, dtype=torch.bool),
    "no rows": torch.ones(0, 3, dtype=torch.bool),
}


@pytest.mark.parametrize("name", MASKS)
def test_packing_is_boolean_indexing(name: str) -> None:
    mask = MASKS[name]
    packing, values = Packing(mask), torch.randn(mask.shape, generator=GEN)
    assert torch.equal(packing.pack(values), values[mask])
    assert torch.equal(packing.lengths, mask.sum(dim=1))
    assert packing.num_tokens == int(mask.sum())


def test_a_ratio_first_read_without_gradients_still_has_them() -> None:
    current = torch.zeros(1, 3, requires_grad=True)
    ratios = LogRatios(torch.zeros(1, 3), torch.zeros(1, 3), current, torch.ones(1, 3))
    with torch.no_grad():
        assert not ratios.total.any()
        assert not ratios.staleness.any()
    assert ratios.total.requires_grad
    assert ratios.staleness.requires_grad
