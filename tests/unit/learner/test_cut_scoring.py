"""Positions to score and their kept ids: every combination of planes, cut for a pack and for ranks that share it."""

from __future__ import annotations

import pytest
import torch

from moe_trm.batch.collate import collate
from moe_trm.learner.scoring import Scoring, cut_scoring, score_hidden
from moe_trm.types import MicroBatch, TrainRow
from routing.layout.packed import PackedLayout
from tests.unit.records import make_record

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


@pytest.mark.parametrize("keep_mask", [True, False])
@pytest.mark.parametrize("kept_mass", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
def test_scores_of_any_batch_against_a_loop_over_its_tokens(*, keep_mask: bool, kept_mass: bool, entropy: bool) -> None:
    """A probe asks for the kept mass whether there are masks or not, and of batches of padding too."""
    rows = tuple(TrainRow(make_record(sample_id=i, num_prompt=2, num_sampled=n)) for i, n in enumerate((3, 1)))
    for micro in (MicroBatch(rows), MicroBatch(())):
        batch = collate(micro, keep_mask=keep_mask)
        made = torch.Generator().manual_seed(0)
        hidden = torch.randn(*batch.mask.shape, 4, generator=made)
        weight = torch.randn(1 + int(batch.target_ids.max()) + 900, 4, generator=made)
        asked = Scoring.of(batch, 0.7, kept_mass=kept_mass, entropy=entropy)
        found = asked.scores(score_hidden(hidden, weight, asked))
        assert (found.log_kept_mass is not None) == (kept_mass and keep_mask)
        assert (found.exact_kl is not None) == keep_mask
        assert (found.entropy is not None) == entropy
        for number, (row, column) in enumerate(batch.mask.nonzero().tolist()):
            logprobs_V = (hidden[row, column] @ weight.T / 0.7).log_softmax(-1)
            mass = torch.tensor(0.0)
            if keep_mask:
                assert batch.kept_ids is not None
                assert batch.kept_offsets is not None
                start, stop = batch.kept_offsets[number : number + 2].tolist()
                mass = logprobs_V[batch.kept_ids[start:stop]].logsumexp(0)
            expected = logprobs_V[batch.target_ids[row, column]] - mass
            torch.testing.assert_close(found.logprobs[row, column], expected)
            if found.log_kept_mass is not None:
                torch.testing.assert_close(found.log_kept_mass[row, column], mass)
            if found.entropy is not None:
                torch.testing.assert_close(found.entropy[row, column], -(logprobs_V.exp() * logprobs_V).sum())
        assert not found.logprobs[~batch.mask].any()
