"""Counts of a replayed pass, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from routing.judge.sample_flips import PassFlips, SampleFlips, total
from routing.record.sources import ReplayRecords
from routing.replay.proof import same_set
from routing.replay.replay_pass import DUE, FLIPPED, MATCHED, NATIVE, ROUTED, Counters, ReplayPass

N, K, E, NUM_LAYERS, SAMPLES = 24, 3, 8, 6, 4
CPU = torch.device("cpu")


def routes(seed: int) -> Tensor:
    return torch.rand(N, E, generator=torch.Generator().manual_seed(seed)).argsort(dim=1)[:, :K]


def counted(
    layers: Sequence[int], maps: dict[int, Tensor], *, free: int = 0, again: bool = False
) -> tuple[Tensor, SampleFlips]:
    """Counters of a forward whose live routers chose other routes, and whose dispatchers held `maps`.

    `again`: its backward recomputes each layer, which has the routes and the dispatch of the forward.
    """
    counters, expected = Counters(NUM_LAYERS, CPU), {layer: routes(layer) for layer in layers}
    due = torch.arange(N) % 5 != 0
    is_free = torch.zeros(N, dtype=torch.bool)
    is_free[due.nonzero()[:free, 0]] = True
    due &= ~is_free
    sample_of = torch.arange(N) // (N // SAMPLES)
    by_sample = torch.zeros(SAMPLES, dtype=torch.int64).index_add(0, sample_of, due.long())
    flips = PassFlips(range(SAMPLES), by_sample, layers, NUM_LAYERS, sample_last=True, device=CPU, sample_of=sample_of)
    opened = ReplayPass(ReplayRecords(()), layers, N, counters)
    opened.targets = opened.expected = expected
    opened.expect(due, is_free, CPU, flips)
    for layer in layers:
        live = torch.where(torch.arange(N)[:, None] % 4 == 0, routes(layer + 50), expected[layer])
        for recompute in (False, True) if again else (False,):
            opened.choose(layer, live, recompute)
            opened.prove(layer, partial(same_set, maps[layer]), recompute)
        maps[layer].zero_()  # what the dispatcher does later is not what the experts got
    return counters.take(torch.zeros(NUM_LAYERS, 0, dtype=torch.int64)), total([flips], NUM_LAYERS)


def maps_of(layers: Sequence[int]) -> dict[int, Tensor]:
    return {layer: torch.zeros(N, E, dtype=torch.bool).scatter_(1, routes(layer), value=True) for layer in layers}


@pytest.mark.parametrize("layers", [(0, 1, 2), (1, 4), (3,)])
@pytest.mark.parametrize(("free", "again"), [(0, False), (3, False), (3, True)])
def test_due_and_flipped_tokens_are_counted_by_layer_and_sample(
    layers: tuple[int, ...], free: int, *, again: bool
) -> None:
    found, by_sample = counted(layers, maps_of(layers), free=free, again=again)
    rows, passes = found[list(layers)], 1 + again
    assert not (rows % passes).any()
    rows //= passes
    num_due = int((torch.arange(N) % 5 != 0).sum()) - free
    assert (rows[:, [DUE, ROUTED, MATCHED]] == num_due).all()
    assert (rows[:, FLIPPED] > 0).all()
    assert (rows[:, NATIVE] == free).all()
    np.testing.assert_array_equal(by_sample.flipped.sum(0)[list(layers)], rows[:, FLIPPED])
    for layer in layers if not free else ():
        both = zip(routes(layer).tolist(), routes(layer + 50).tolist(), strict=True)
        lost = [len({*recorded} - {*live}) for recorded, live in both]
        due = [number for token, number in enumerate(lost) if token % 5 and not token % 4]
        assert by_sample.lost[:, layer].sum() == sum(due) > sum(number > 0 for number in due)
    assert int(found.sum()) == passes * int(rows.sum())


@pytest.mark.parametrize("wrong", ["another", "one more", "one less", "none"])
def test_a_wrong_map_is_counted_once_for_each_token(wrong: str) -> None:
    layers = (0, 1, 2)
    maps = maps_of(layers)
    row, ids = maps[1][7], routes(1)[7]
    others = (~row).nonzero()[:, 0]
    if wrong in ("another", "one less"):
        row[ids[0]] = False
    if wrong in ("another", "one more"):
        row[others[0]] = True
    if wrong == "none":
        row[:] = False
    found, _ = counted(layers, maps)
    assert (found[list(layers), DUE] - found[list(layers), MATCHED]).tolist() == [0, 1, 0]


def test_repeated_ids_match_no_map() -> None:
    """Three times one id, which is chosen, beside one that is not: as many are found and chosen as in a good row."""
    counters = Counters(1, CPU)
    opened = ReplayPass(ReplayRecords(()), (0,), 1, counters)
    opened.targets = opened.expected = {0: torch.tensor([[0, 0, 0, 5]])}
    opened.expect(torch.ones(1, dtype=torch.bool), None, CPU)
    opened.choose(0, torch.tensor([[0, 1, 2, 3]]), recompute=False)
    held = torch.tensor([[True, True, False, False, False, False]])
    opened.prove(0, partial(same_set, held), False)
    assert counters.take(torch.zeros(1, 0, dtype=torch.int64))[0, MATCHED] == 0


def test_a_router_that_was_not_asked_is_missed() -> None:
    counters, layers = Counters(2, CPU), (0, 1)
    opened = ReplayPass(ReplayRecords(()), layers, N, counters)
    opened.targets = opened.expected = {layer: routes(layer) for layer in layers}
    opened.expect(torch.ones(N, dtype=torch.bool), None, CPU)
    opened.choose(0, routes(0), recompute=False)
    for layer, held in maps_of(layers).items():
        opened.prove(layer, partial(same_set, held), False)
    found = counters.take(torch.zeros(2, 0, dtype=torch.int64))
    assert found[:, ROUTED].tolist() == [N, 0]
    assert found[:, MATCHED].tolist() == [N, N]


def test_counters_are_empty_once_taken() -> None:
    counters = Counters(2, CPU)
    counters.count(1, DUE, 3)
    counters.device[0, MATCHED] += 2
    beside = torch.tensor([[7], [8]])
    assert counters.take(beside).tolist() == [[0, 0, 2, 0, 0, 7], [3, 0, 0, 0, 0, 8]]
    assert not counters.take(beside[:, :0]).any()
