"""Packs against hand-worked cuts, their inverse, and the independent arithmetic of the proof."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing import PackedLayout, RouteError, RouteRecord
from routing.layout.packed import packed_places
from routing.layout.padded import Layout
from routing.replay.proof import due_by_sample, due_tokens, free_tokens, locate, sample_of_tokens
from tests.unit.routing.cuts import expected_routes, local_targets

GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)]
LENGTHS = (5, 0, 3, 6)
R, E, K, LAYERS = 7, 8, 2, (1, 3)


def ranks(lengths: tuple[int, ...], length: int, cp: int, sp: int) -> list[PackedLayout]:
    return [PackedLayout(lengths, length, cp, c, sp, s) for c in range(cp) for s in range(sp)]


def records() -> list[RouteRecord | None]:
    rng = np.random.default_rng(0)
    return [
        RouteRecord(np.argsort(rng.random((length, 2, E)), -1)[..., :K].astype(np.uint8), LAYERS, E) if length else None
        for length in LENGTHS
    ]


def test_a_pack_by_hand() -> None:
    layout = PackedLayout((2, 3), 4)
    values = torch.tensor([[10, 11, 0, 0], [20, 21, 22, 0]])
    assert layout.cut_tokens(values).tolist() == [[10, 11, 20, 21, 22]]
    assert layout.position_ids().tolist() == [[0, 1, 0, 1, 2]]
    assert layout.uncut_tokens(torch.arange(1, 6)[None]).tolist() == [[1, 2, 0, 0], [3, 4, 5, 0]]
    assert (layout.sequences, layout.num_places, layout.fed) == ((2, 3), 5, (1, 5))


def test_context_parallel_zigzag_inside_of_each_sequence_by_hand() -> None:
    values = torch.tensor([[1, 2, 3, 4, 0, 0], [11, 12, 13, 14, 15, 0]])
    first, second = ranks((4, 5), 6, 2, 1)
    assert first.sequences == (4, 8)
    assert first.cut_tokens(values).tolist() == [[1, 4, 11, 12, 0, 0]]
    assert second.cut_tokens(values).tolist() == [[2, 3, 13, 14, 15, 0]]
    assert first.position_ids().tolist() == [[0, 3, 0, 1, 6, 7]]


def test_sequence_parallel_shards_of_the_whole_pack_by_hand() -> None:
    values = torch.tensor([[1, 2, 3], [4, 5, 0]])
    shards = ranks((3, 2), 3, 1, 2)
    assert [shard.to_router(values).tolist() for shard in shards] == [[1, 2, 3], [4, 5, 0]]
    assert shards[0].sequences == (3, 3)


@pytest.mark.parametrize(("cp", "sp"), GRIDS)
def test_ranks_partition_the_tokens_and_inverses_restore_them(cp: int, sp: int) -> None:
    real = torch.arange(R)[None] < torch.tensor(LENGTHS)[:, None]
    values = torch.where(real, 1 + torch.arange(len(LENGTHS) * R).view(-1, R), 0)
    layouts = ranks(LENGTHS, R, cp, sp)
    assert sum(layout.from_router(layout.to_router(values)) for layout in layouts).equal(values)
    assert sum(layout.uncut_tokens(layout.cut_tokens(values)) for layout in ranks(LENGTHS, R, cp, 1)).equal(values)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple),
    grid=st.sampled_from(GRIDS),
)
def test_the_proof_arithmetic_agrees_with_the_map(lengths: tuple[int, ...], grid: tuple[int, int]) -> None:
    length = max(*lengths, 1)
    valid = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
    places = 1 + torch.arange(len(lengths) * length).view(-1, length)
    total = 0
    for layout in ranks(lengths, length, *grid):
        sequence, column = locate(layout)
        due = due_tokens(lengths, layout)
        own = layout.to_router(torch.where(valid, places, 0))
        assert len(own) == layout.num_local
        assert due.equal(own > 0)
        assert (1 + sequence * length + column)[due.numpy()].tolist() == own[due].tolist()
        assert int(due_by_sample(due, layout).sum()) == int(due.sum())
        total += int(due.sum())
    assert total == sum(lengths)


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8), grid=st.sampled_from(GRIDS))
def test_alignment_is_no_more_than_ranks_need(lengths: list[int], grid: tuple[int, int]) -> None:
    cp, sp = grid
    places = packed_places(lengths, cp, sp)
    each = 2 * cp if cp > 1 else 1
    assert all(taken % each == 0 for taken in places)
    assert sum(places) % (cp * sp) == 0
    rows = sum(1 for length in lengths if length)
    assert sum(places) - sum(lengths) <= max(2, rows * (each - 1) + each * cp * sp)
    if grid == (1, 1) and sum(lengths) > 1:
        assert places == tuple(lengths)


@pytest.mark.parametrize(("cp", "sp"), GRIDS)
def test_targets_equal_the_independent_cut_on_every_rank(cp: int, sp: int) -> None:
    known, seen = records(), 0
    for layout in ranks(LENGTHS, R, cp, sp):
        targets = local_targets(known, layout, LAYERS, E, K)
        expected = expected_routes(known, layout, LAYERS, E, K)
        due = due_tokens(LENGTHS, layout)
        seen += int(due.sum())
        for layer in LAYERS:
            assert targets[layer][due].equal(expected[layer][due])
            assert (targets[layer].sort(1).values.diff(dim=1) > 0).all(), "alignment must hold distinct ids"
    assert seen == sum(LENGTHS)


@pytest.mark.parametrize(("cp", "sp"), GRIDS)
def test_a_route_at_the_wrong_token_is_not_the_one_that_the_proof_expects(
    cp: int, sp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, layouts = records(), ranks(LENGTHS, R, cp, sp)
    right = PackedLayout.router_index
    # Inside of a sequence, so that every sample still has routes of its own.
    monkeypatch.setattr(PackedLayout, "router_index", lambda self: right(self).roll(1))
    wrong = 0
    for layout in layouts:
        due = due_tokens(LENGTHS, layout)
        targets, expected = local_targets(known, layout, (1,), E, K), expected_routes(known, layout, (1,), E, K)
        wrong += int((targets[1] != expected[1]).any(1)[due].sum())
    assert wrong > sum(LENGTHS) // 2


def test_tokens_without_routes_are_free_in_their_place() -> None:
    known = records()
    last = known[3]
    assert last is not None
    covered = np.array([True, True, False, True, True, True])
    known[3] = RouteRecord(last.experts, LAYERS, E, covered=covered)
    for cp, sp in GRIDS:
        free = torch.zeros(len(LENGTHS), R)
        for layout in ranks(LENGTHS, R, cp, sp):
            own = free_tokens(known, layout)
            assert own is not None
            free += layout.from_router(own.float())
        assert free.nonzero().tolist() == [[3, 2]]


def test_samples_of_tokens_follow_each_other() -> None:
    owner = sample_of_tokens(PackedLayout((2, 0, 1), 2))
    assert owner is not None
    assert owner.tolist() == [0, 0, 2]
    assert sample_of_tokens(Layout(2, 3)) is None


def test_uncut_is_differentiable_and_leaves_alignment_out() -> None:
    local = torch.ones(1, 6, dtype=torch.float64, requires_grad=True)
    layout = PackedLayout((4, 5), 6, 2, 1)
    layout.uncut_tokens(local).mul(torch.arange(1, 13).view(2, 6)).sum().backward()
    assert local.grad is not None
    assert local.grad.tolist() == [[2, 3, 9, 10, 11, 0]]


def test_packs_of_other_rows_have_other_digests() -> None:
    assert PackedLayout((2, 3), 4).digest() == PackedLayout((2, 3), 4).digest()
    assert PackedLayout((2, 3), 4).digest() != PackedLayout((3, 2), 4).digest()
    assert Layout(2, 4).digest() == b""


def test_rows_of_a_pack_for_models_of_transformers() -> None:
    rows = PackedLayout((2, 0, 3), 4).rows()
    assert rows.spans == ((0, 2), (2, 2), (2, 5))
    assert rows.is_packed
    empty = PackedLayout((0,), 3).rows()
    assert (empty.shape, empty.spans) == ((1, 2), ((0, 0),))


@pytest.mark.parametrize("sizes", [((), 4), ((5,), 4), ((2,), 4, 2, 2), ((2,), 4, 1, 0, 2, -1)])
def test_what_is_no_pack_is_refused(sizes: tuple[object, ...]) -> None:
    with pytest.raises(RouteError) as error:
        PackedLayout(*sizes)  # type: ignore[arg-type]
    assert error.value.reason == "shape"


def test_tensors_that_do_not_fit_are_refused() -> None:
    layout = PackedLayout((2, 3), 4)
    for call, shape in ((layout.cut_tokens, (2, 5)), (layout.to_router, (5,)), (layout.uncut_tokens, (1, 8))):
        with pytest.raises(RouteError):
            call(torch.zeros(shape))
    with pytest.raises(RouteError):
        layout.from_router(torch.zeros(8, 2))
