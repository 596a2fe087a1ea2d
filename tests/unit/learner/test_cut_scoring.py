"""Positions to score and their kept ids, cut for a pack and for ranks that share it."""

from __future__ import annotations

import pytest
import torch

from moe_trm.learner.scoring import Scoring, cut_scoring
from routing.packed_layout import PackedLayout

LENGTHS, COLUMNS = (3, 6, 1), 6
KEPT = [[7], [1, 2, 3], [5, 0], [4], [8, 9], [6]]
"""Kept ids of the scored positions, row by row."""


def scoring() -> Scoring:
    mask = torch.zeros(len(LENGTHS), COLUMNS, dtype=torch.bool)
    mask[0, 1:3] = mask[1, 3:6] = mask[2, 0] = True
    sizes = torch.tensor([0, *map(len, KEPT)])
    ids = torch.tensor([number for kept in KEPT for number in kept])
    targets = torch.arange(len(LENGTHS) * COLUMNS).view(len(LENGTHS), COLUMNS)
    return Scoring(targets, mask, ids, sizes.cumsum(0), ids.float(), temperature=1.0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_scored_position_keeps_its_target_and_its_ids(ranks: int) -> None:
    whole, found = scoring(), dict[int, list[int]]()
    expected = dict(zip(whole.target_ids[whole.mask].tolist(), KEPT, strict=True))
    for rank in range(ranks):
        own = cut_scoring(whole, PackedLayout(LENGTHS, COLUMNS, cp_size=ranks, cp_rank=rank))
        assert own.kept_ids is not None
        assert own.kept_offsets is not None
        assert own.kept_logprobs is not None
        assert torch.equal(own.kept_logprobs, own.kept_ids.float())
        kept = torch.tensor_split(own.kept_ids, own.kept_offsets[1:-1])
        targets = own.target_ids[own.mask].tolist()
        found |= {target: ids.tolist() for target, ids in zip(targets, kept, strict=True)}
    assert found == expected
