"""Columns of one rank, against cutting the whole by hand, in every layout."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing import Layout, PackedLayout, RouteError, Rows
from routing.hf import HFReplayer
from routing.layout.columns import Columns
from routing.record.sources import Record, ReplayRecorded, ReplayRecords, check_rows
from routing.replay.placing import placed_routes, sliced_routes
from tests.unit.routing.toy_model import LAYERS, E, K, Toy, records


def lengths_of(draw: Any, multiple: int) -> tuple[list[int], list[int]]:
    """Real lengths of sequences, and what is set aside for each."""
    real = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return real, [-(-length // multiple) * multiple for length in real]


@st.composite
def cuts(draw: Any) -> tuple[Rows, str, int]:
    """Rows of any layout that split for `size` ranks."""
    size = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["contiguous", "zigzag"]))
    real, room = lengths_of(draw, 2 * size)
    if draw(st.booleans()):
        tail = 2 * size * draw(st.integers(0, 2))
        padded = torch.tensor([0, *room]).cumsum(0)
        offsets = torch.tensor([0, *real]).cumsum(0)
        return Rows.packed(offsets, int(padded[-1]) + tail, cu_seqlens_padded=padded), kind, size
    columns = max(room) + 2 * size * draw(st.integers(0, 2))
    before = [draw(st.integers(0, columns - length)) for length in real]
    column, first = torch.arange(columns)[None], torch.tensor(before)[:, None]
    mask = (column >= first) & (column < first + torch.tensor(real)[:, None])
    return Rows.padded(mask), kind, size


def by_hand(rows: Rows, kind: str, rank: int, size: int) -> list[int]:
    """Columns of a rank, one at a time."""
    columns = rows.shape[1]
    if kind == "contiguous":
        return [column for column in range(columns) if column * size // columns == rank]
    ends = [0, columns]
    if rows.is_packed:
        ends = sorted({start for start, _ in rows.segments} | {rows.segments[-1][1], columns})
    found: list[int] = []
    for start, stop in pairwise(ends):
        piece = (stop - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            found += range(start + number * piece, start + (number + 1) * piece)
    return found


def made(rows: Rows, kind: str, rank: int, size: int) -> Columns:
    return (Columns.contiguous if kind == "contiguous" else Columns.zigzag)(rows, rank, size)


@given(cuts())
def test_each_rank_has_its_columns_and_all_have_all(drawn: tuple[Rows, str, int]) -> None:
    rows, kind, size = drawn
    values = torch.arange(rows.shape[0] * rows.shape[1]).view(rows.shape)
    whole = torch.zeros_like(values)
    for rank in range(size):
        columns = made(rows, kind, rank, size)
        assert columns.index.tolist() == by_hand(rows, kind, rank, size)
        assert columns.owned().nonzero().flatten().tolist() == columns.index.tolist()
        local = columns.cut(values)
        assert torch.equal(local, values[:, by_hand(rows, kind, rank, size)])
        assert tuple(local.shape) == columns.shape
        assert torch.equal(columns.cut_places(values.flatten()), local.flatten())
        assert torch.equal(columns.keep_owned(values.flatten()), local.flatten())
        assert torch.equal(columns.position_ids(), rows.position_ids()[:, columns.index])
        whole += columns.uncut(local)
    assert torch.equal(whole, values)


@given(cuts(), st.integers(1, 3))
def test_sequence_parallel_parts_divide_a_context_parallel_rank(drawn: tuple[Rows, str, int], parts: int) -> None:
    rows, kind, size = drawn
    columns = made(rows, kind, 0, size)
    if columns.shape[1] % parts:
        with pytest.raises(RouteError, match="do not split"):
            columns.part(0, parts)
        return
    pieces = [columns.part(part, parts) for part in range(parts)]
    assert torch.cat([piece.index for piece in pieces]).tolist() == columns.index.tolist()
    for piece in pieces:
        assert piece.owned().nonzero().flatten().tolist() == sorted(piece.index.tolist())


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_right_padded_rows_are_cut_as_megatrons_layout_cuts_them(cp: int, sp: int, batch: int, data: Any) -> None:
    length = 2 * cp * sp * data.draw(st.integers(1, 2))
    rows = Rows.right_padded(torch.ones(batch, length))
    cp_rank, sp_rank = data.draw(st.integers(0, cp - 1)), data.draw(st.integers(0, sp - 1))
    layout = Layout(batch, length, cp, cp_rank, sp, sp_rank)
    columns = (Columns.zigzag(rows, cp_rank, cp) if cp > 1 else Columns(rows)).part(sp_rank, sp)
    places = torch.arange(batch * length).view(batch, length)
    assert columns.cut(places).T.flatten().tolist() == layout.router_index().tolist()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_packs_are_cut_as_the_learners_layout_cuts_them(lengths: list[int], cp: int, sp: int, data: Any) -> None:
    cp_rank, sp_rank = data.draw(st.integers(0, cp - 1)), data.draw(st.integers(0, sp - 1))
    layout = PackedLayout(tuple(lengths), max(lengths), cp, cp_rank, sp, sp_rank)
    offsets, places = (torch.tensor([0, *parts]).cumsum(0) for parts in (lengths, layout.places))
    rows = Rows.packed(offsets, cu_seqlens_padded=places)
    columns = (Columns.zigzag(rows, cp_rank, cp) if cp > 1 else Columns(rows)).part(sp_rank, sp)
    assert columns.index.tolist() == layout.router_index().tolist()
    if sp == 1:
        assert columns.position_ids().tolist() == layout.position_ids().tolist()


@given(cuts())
def test_routes_of_a_rank_are_those_of_its_columns(drawn: tuple[Rows, str, int]) -> None:
    rows, kind, size = drawn
    tokens = torch.arange(rows.shape[0] * rows.shape[1]).view(rows.shape)
    known = records(rows, tokens)
    check_rows(known, rows, tokens, None)
    whole = placed_routes(known, rows, LAYERS, E, K)
    for rank in range(size):
        columns = made(rows, kind, rank, size)
        local = by_hand(rows, kind, rank, size)
        for cut in (placed_routes, sliced_routes):
            got = cut(known, rows, LAYERS, E, K, columns)
            for layer in LAYERS:
                expected = whole[layer].view(*rows.shape, K)[:, local].flatten(0, 1)
                assert torch.equal(got[layer], expected)


PACKED = Rows.packed(torch.tensor([0, 7, 8, 14]), cu_seqlens_padded=torch.tensor([0, 8, 12, 20]))
LEFT = Rows.left_padded(torch.arange(8)[None] >= torch.tensor([[1], [7], [2]]))
RIGHT = Rows.right_padded(torch.arange(8)[None] < torch.tensor([[7], [1], [6]]))


@pytest.mark.parametrize("rows", [PACKED, LEFT, RIGHT], ids=["packed", "left", "right"])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_ranks_replay_their_columns_and_together_the_whole(rows: Rows, kind: str) -> None:
    model: Any = Toy()
    replayer = HFReplayer(model, max_local_flip_rate=1.0)
    tokens = torch.randint(0, 64, rows.shape, generator=torch.Generator().manual_seed(1))
    known = ReplayRecords(records(rows, tokens))
    with replayer.use_rows(known, rows, tokens):
        whole = model(tokens)
    whole.sum().backward()
    expected = [model.layers[layer].mlp.gate.weight.grad.clone() for layer in LAYERS]
    report = replayer.report()
    model.zero_grad()
    flips, replayed = 0, 0
    for rank in range(2):
        columns = made(rows, kind, rank, 2)
        with replayer.use_rows(known, rows, tokens, columns=columns):
            local = model(columns.cut(tokens))
        assert torch.equal(local, columns.cut(whole))
        local.sum().backward()
        got = replayer.report()
        assert got.matched == got.replayed
        flips, replayed = flips + got.local_flips, replayed + got.replayed
    assert (flips, replayed) == (report.local_flips, report.replayed)
    assert flips > 0
    for layer, gradient in zip(LAYERS, expected, strict=True):
        torch.testing.assert_close(model.layers[layer].mlp.gate.weight.grad, gradient)


def test_routes_recorded_on_a_ranks_columns_are_refused_on_anothers() -> None:
    model, tokens = Toy(), torch.randint(0, 64, PACKED.shape)
    replayer = HFReplayer(model)
    first, second = (Columns.zigzag(PACKED, rank, 2) for rank in range(2))
    with replayer.use_rows(Record(), PACKED, tokens, columns=first) as passed:
        model(first.cut(tokens))
    again = ReplayRecorded(passed.recorded())
    with replayer.use_rows(again, PACKED, tokens, columns=first):
        model(first.cut(tokens))
    assert replayer.report().local_flips == 0
    for columns in (second, Columns.contiguous(PACKED, 0, 2)):
        with (
            pytest.raises(RouteError, match="another micro-batch"),
            replayer.use_rows(again, PACKED, tokens, columns=columns),
        ):
            pass


def test_what_does_not_fit_is_refused() -> None:
    tokens = torch.zeros(LEFT.shape, dtype=torch.long)
    replayer = HFReplayer(Toy())
    with (
        pytest.raises(RouteError, match="other rows"),
        replayer.use_rows(ReplayRecords(records(LEFT, tokens)), LEFT, tokens, columns=Columns.zigzag(RIGHT, 0, 2)),
    ):
        pass
    offsets = torch.tensor([0, 7, 8, 14])
    for make, reason in [
        (lambda: Columns.contiguous(LEFT, 0, 3), "shape"),
        (lambda: Columns.contiguous(LEFT, 2, 2), "shape"),
        (lambda: Columns.zigzag(LEFT, 0, 2).part(0, 3), "shape"),
        (lambda: Columns.zigzag(Rows.packed(offsets), 0, 2), "shape"),
        (lambda: Columns.zigzag(Rows.packed(torch.tensor([0, 8]), 10), 0, 2), "shape"),
        (lambda: Columns(LEFT, (*Columns.contiguous(LEFT, 0, 2).cuts, *Columns.zigzag(LEFT, 0, 2).cuts)), "shape"),
        (lambda: Rows.packed(offsets, cu_seqlens_padded=torch.tensor([0, 8, 12])), "rows"),
        (lambda: Rows.packed(offsets, cu_seqlens_padded=torch.tensor([0, 6, 12, 20])), "rows"),
        (lambda: Rows.packed(offsets, 19, cu_seqlens_padded=torch.tensor([0, 8, 12, 20])), "rows"),
        (lambda: Rows.packed(offsets, cu_seqlens_padded=torch.tensor([0.0, 8, 12, 20])), "shape"),
    ]:
        with pytest.raises(RouteError) as error:
            make()
        assert error.value.reason == reason


def test_padding_between_packed_sequences_holds_no_token() -> None:
    assert PACKED.lengths == (7, 1, 6)
    assert PACKED.spans == ((0, 7), (8, 9), (12, 18))
    assert PACKED.mask()[0].tolist() == [place in {*range(7), 8, *range(12, 18)} for place in range(20)]
    assert PACKED.position_ids()[0].tolist() == [*range(8), *range(4), *range(8)]
    assert PACKED.digest() != Rows.packed(torch.tensor([0, 7, 8, 14]), 20).digest()
