"""The second look: wrong routes are told from a router that has moved, from comparisons of routes alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from routing import FlipBoundError, ReplayProofError, RouteRecord
from routing.judge.alignment import Agreement, SuspectFinding, _judge, _routes, examine, refuse
from routing.judge.flip_bound import Suspect
from routing.layout.padded import Layout
from routing.record.sources import Record, Recorded, ReplayRecorded, ReplayRecords, ReplayReport

E, K, LAYERS, T = 16, 4, (1, 2, 5, 6), 60
DEPTH = 7
CPU = torch.device("cpu")
Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def natural(rng: np.random.Generator) -> np.ndarray:
    """`[T, L, K]` sets; one expert is in most of them, as in models whose load is uneven."""
    scores = rng.normal(size=(T, len(LAYERS), E))
    scores[..., 3] += 2
    return np.argsort(-scores, axis=-1)[..., :K]


def random(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return np.argsort(rng.random((*shape, E)), axis=-1)[..., :K]


def exchanged(experts: np.ndarray, rng: np.random.Generator, share: float = 0.7) -> np.ndarray:
    """One of the experts is another one, in a share of the sets, whichever the token."""
    free = rng.random((*experts.shape[:2], E))
    np.put_along_axis(free, experts, -1, axis=-1)
    other = experts.copy()
    other[..., 0] = free.argmax(-1)
    return np.where(rng.random((*experts.shape[:2], 1)) < share, other, experts)


def looked(change: Change, *, layer: int = 2, cp: int = 1, recorded: bool = False, seed: int = 0) -> SuspectFinding:
    """The finding on sample 7, row 1 of two, whose routes are the live ones after `change`."""
    rng = np.random.default_rng(seed)
    live = np.stack([natural(rng), natural(rng)])
    theirs = np.stack([live[0], change(live[1], rng)])
    records = tuple(RouteRecord(one.astype(np.uint8), LAYERS, E) for one in theirs)
    suspect = Suspect(7, layer, 1.0, 0.6, 0.01, T)
    doubt = FlipBoundError("too many", [suspect], ReplayReport(240, 240, 200))
    flat = None
    layouts = [Layout(2, T, cp, rank) for rank in range(cp)]

    def routes_of(routes: np.ndarray, layout: Layout) -> Recorded:
        whole = torch.from_numpy(routes).long()
        return Recorded({at: layout.to_router(whole[:, :, place]) for place, at in enumerate(LAYERS)}, layout=layout)

    for layout in layouts:
        source = ReplayRecorded(routes_of(theirs, layout)) if recorded else ReplayRecords(records)
        own = routes_of(live, layout)
        if cp == 1:
            return examine(doubt, [[3, 7]], [source], [own], DEPTH, None, CPU)[0]
        sums = Agreement.nothing(1, DEPTH)
        sums.add(0, *_routes(source, own, 1, 2), worst=layer)
        flat = sums.flat() if flat is None else flat + sums.flat()
    assert flat is not None
    return _judge(Agreement.of(flat, 1, DEPTH), suspect, 0)


WRONG: dict[str, tuple[Change, str]] = {
    "random": (lambda e, rng: random(e.shape[:2], rng), "unrelated"),
    "next row": (lambda e, rng: np.roll(e, 1, axis=0), "of the row before"),
    "row before": (lambda e, rng: np.roll(e, -1, axis=0), "of the row after"),
    "swapped layers": (lambda e, rng: e[:, [0, 2, 1, 3]], "of layer 5"),
    "one layer": (lambda e, rng: np.concatenate([e[:, :1], random((T, 1), rng), e[:, 2:]], axis=1), "unrelated"),
    "last third": (lambda e, rng: np.concatenate([e[:40], random((20, len(LAYERS)), rng)]), "disagree altogether"),
}


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("fault", WRONG)
def test_wrong_routes_are_wrong_and_it_is_said_whose_they_are(fault: str, cp: int) -> None:
    change, words = WRONG[fault]
    for seed in range(2):
        finding = looked(change, cp=cp, seed=seed)
        assert not finding.in_place
        assert words in finding.words


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("cp", [1, 2])
def test_a_router_that_moved_is_in_place(share: float, cp: int) -> None:
    for seed in range(2):
        assert looked(lambda e, rng: exchanged(e, rng, share), cp=cp, seed=seed).in_place


def test_a_router_that_moved_and_wrong_rows_together_are_wrong() -> None:
    for seed in range(2):
        finding = looked(lambda e, rng: exchanged(np.roll(e, 1, axis=0), rng), seed=seed)
        assert (finding.in_place, "of the row before" in finding.words) == (False, True)


def test_routes_recorded_by_the_learner_are_looked_at_too() -> None:
    assert looked(lambda e, rng: exchanged(e, rng), recorded=True).in_place
    assert not looked(WRONG["random"][0], recorded=True).in_place


def test_one_wrong_sample_stops_all_and_moved_ones_are_counted() -> None:
    suspects = [Suspect(sample, 2, 0.9, 0.6, 0.01, T) for sample in range(7)]
    report = ReplayReport(100, 100, 60, {2: 0.6}, 3)
    doubt = FlipBoundError("sets differ", suspects, report)
    fine = [SuspectFinding(suspect, True, "in place") for suspect in suspects]
    counted = refuse(doubt, fine)
    assert counted == ReplayReport(100, 100, 60, {2: 0.6}, 3, moved=7)
    assert (counted + report).moved == 7
    bad = [*fine[:2], SuspectFinding(suspects[2], False, "These are the routes of layer 5"), *fine[3:]]
    with pytest.raises(ReplayProofError, match=r"of 1 samples.*\n  sample 2, layer 2: 90.0%.*routes of layer 5"):
        refuse(doubt, bad)
    with pytest.raises(ReplayProofError, match=r"of 7 samples(.|\n)*sample 0(.|\n)*sample 6"):
        refuse(doubt, [SuspectFinding(suspect, False, "unrelated") for suspect in suspects])


def test_other_samples_and_native_passes_are_left_alone() -> None:
    doubt = FlipBoundError("too many", [Suspect(7, 2, 1.0, 0.6, 0.01, T)], ReplayReport())
    nothing = examine(doubt, [[3, 8]], [Record()], [None], DEPTH, None, CPU)[0]
    assert not nothing.in_place
