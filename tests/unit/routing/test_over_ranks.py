"""Counts of a proof over ranks: the sums of all, sample by sample, whoever has which samples, layers and how many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed import ProcessGroup

from routing.judge.sample_flips import PassFlips, SampleFlips, total
from routing.replay.over_ranks import ROOM, over_ranks

LAYERS, RANKS = 5, 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[ProcessGroup]]:
    """The ranks of a real group, as threads of this process."""
    gloo: Any = distributed
    store = gloo.HashStore()
    with ThreadPoolExecutor(RANKS) as pool:
        yield list(pool.map(lambda rank: gloo.ProcessGroupGloo(store, rank, RANKS), range(RANKS)))


def passes_of(rank: int, keys: Sequence[int], layers: Sequence[int], number: int = 2) -> list[PassFlips]:
    """Forwards of the same samples in these layers, with counts of their own."""
    made, random = [], torch.Generator().manual_seed(rank)
    for _ in range(number):
        due = torch.randint(1, 90, (len(keys),), generator=random)
        one = PassFlips(
            *(keys, due, layers, LAYERS),
            sample_last=True,
            device=CPU,
            due_N=torch.ones(20 * len(keys), dtype=torch.bool),
            experts=(2, 16),
            at_sampling=[True] * len(keys),
        )
        for layer in layers:
            lost_N = torch.randint(0, 3, (20 * len(keys),), generator=random, dtype=torch.int32)
            one.count(layer, torch.stack((lost_N.clamp(max=1), lost_N)))
        made.append(one)
    return made


def everywhere(
    ranks: Sequence[ProcessGroup], passes: Sequence[list[PassFlips]], sums: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, SampleFlips]]:
    with ThreadPoolExecutor(RANKS) as pool:
        asked = [
            pool.submit(over_ranks, own, total(found, LAYERS), group, CPU)
            for group, found, own in zip(ranks, passes, sums, strict=True)
        ]
        return [one.result(timeout=60) for one in asked]


@pytest.mark.parametrize("samples", [1, 6, 400])
def test_every_rank_has_the_counts_of_all_samples(ranks: list[ProcessGroup], samples: int) -> None:
    """Two ranks share samples and have other layers, one has others; 400 of them need a second exchange."""
    named = [*range(samples)], [*range(samples)], [(1 << 62) + place for place in range(3)]
    held = (0, 1), (3,), (4, 0)
    passes = [passes_of(rank, named[rank], held[rank]) for rank in range(RANKS)]
    sums = [torch.arange(LAYERS * 7).view(LAYERS, 7) * (rank + 1) for rank in range(RANKS)]
    requested = total([one for found in passes for one in found], LAYERS)
    assert (samples == 400) == (3 * samples * 2 > ROOM)
    for counters, flips in everywhere(ranks, passes, sums):
        assert torch.equal(counters, torch.arange(LAYERS * 7).view(LAYERS, 7) * 6)
        assert requested.apart.all(1).sum() == len({layer for own in held for layer in own})
        assert requested.ends[:, :2].all()
        for name in ("keys", "due", "flipped", "lost", "apart", "ends", "fresh"):
            np.testing.assert_array_equal(getattr(flips, name), getattr(requested, name), err_msg=name)
            assert getattr(flips, name).dtype == getattr(requested, name).dtype
        np.testing.assert_array_equal(flips.by_token[:3], requested.by_token[:3])


def test_ranks_without_anything_to_prove_only_add(ranks: list[ProcessGroup]) -> None:
    """Nothing was replayed anywhere; or on one rank alone, whose micro-batch was padding but for a row."""
    counters = torch.zeros(LAYERS, 7, dtype=torch.int64)
    for found, flips in everywhere(ranks, [[], [], []], [counters] * RANKS):
        assert not found.any()
        assert flips.due.shape == (0, LAYERS)
    alone = passes_of(0, [7], [2])
    padding = PassFlips([-1], torch.tensor([0]), (2,), LAYERS, sample_last=True, device=CPU)
    for _, flips in everywhere(ranks, [[*alone, padding], [padding], []], [counters] * RANKS):
        assert flips.keys.tolist() == [7]
        np.testing.assert_array_equal(flips.due, total(alone, LAYERS).due)


def test_samples_of_one_rank_that_have_other_layers_keep_them(ranks: list[ProcessGroup]) -> None:
    passes = [*passes_of(0, [7], [2]), *passes_of(0, [8], [0, 4])]
    requested = total(passes, LAYERS)
    for _, flips in everywhere(ranks, [passes, [], []], [torch.zeros(LAYERS, 7, dtype=torch.int64)] * RANKS):
        assert flips.keys.tolist() == [7, 8]
        np.testing.assert_array_equal(flips.due, requested.due)
        np.testing.assert_array_equal(flips.lost, requested.lost)


def test_a_single_process_adds_by_sample_alone() -> None:
    counters, (one,) = torch.ones(2, 2, dtype=torch.int64), passes_of(0, [3, 1, 3], [0], number=1)
    found, flips = over_ranks(counters, total([one], LAYERS), None, CPU)
    assert found is counters
    assert flips.keys.tolist() == [1, 3]
    assert flips.due[:, 0].tolist() == [one.due_BL[1, 0], one.due_BL[0, 0] + one.due_BL[2, 0]]


def test_rows_of_one_sample_in_one_pass_are_added(ranks: list[ProcessGroup]) -> None:
    passes = [passes_of(rank, [5, 2, 5][rank:], [1], number=1) for rank in range(RANKS)]
    lost = dict.fromkeys((2, 5), 0)
    for one in (one for own in passes for one in own):
        for key, count in zip(one.keys, one.counts_LKB[1, 1].tolist(), strict=True):
            lost[key] += count
    for _, flips in everywhere(ranks, passes, [torch.zeros(LAYERS, 7, dtype=torch.int64)] * RANKS):
        assert dict(zip(flips.keys.tolist(), flips.lost[:, 1].tolist(), strict=True)) == lost
