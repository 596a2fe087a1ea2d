"""Places of sequences in rows of any layout, and their routes at these places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from routing import RouteError, RouteRecord, Rows, token_digest
from routing.record.sources import check_rows
from routing.replay.placing import placed_routes, sliced_routes, uncovered

E, K, LAYERS, LENGTHS = 8, 2, (0, 3), (5, 1, 3)
COLUMNS = 7


def mask(*rows: str) -> Tensor:
    """`x` is a token, `.` is padding."""
    return torch.tensor([[sign == "x" for sign in row] for row in rows])


LAYOUTS = {
    "right": Rows.right_padded(mask("xxxxx..", "x......", "xxx....")),
    "left": Rows.left_padded(mask("..xxxxx", "......x", "....xxx")),
    "both": Rows.padded(mask(".xxxxx.", "...x...", "xxx....")),
    "packed": Rows.packed(torch.tensor([0, 5, 6, 9])),
    "packed and padded": Rows.packed(torch.tensor([0, 5, 6, 9], dtype=torch.int32), 16),
}


def sequences() -> list[np.ndarray]:
    return [np.arange(length) + 10 * index for index, length in enumerate(LENGTHS)]


def placed(rows: Rows, parts: list[np.ndarray]) -> Tensor:
    """`[B, R]` with the parts at their places, and 99 elsewhere."""
    values = torch.full(rows.shape, 99).flatten()
    values[rows.places()] = torch.from_numpy(np.concatenate(parts))
    return values.view(rows.shape)


def record(tokens: np.ndarray, seed: int) -> RouteRecord | None:
    if len(tokens) == 1:
        return None
    draw = np.random.default_rng(seed).random((len(tokens) - 1, len(LAYERS), E))
    return RouteRecord(np.argsort(draw, axis=-1)[..., :K].astype(np.uint8), LAYERS, E, token_digest(tokens))


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_token_has_its_place(name: str) -> None:
    rows = LAYOUTS[name]
    assert rows.lengths == LENGTHS
    tokens = placed(rows, sequences())
    for got, expected in zip(rows.sequences(tokens), sequences(), strict=True):
        assert got.tolist() == expected.tolist()
    assert int(rows.mask().sum()) == sum(LENGTHS)
    assert (tokens[~rows.mask()] == 99).all()
    assert tokens[rows.mask() & ~rows.without_last()].tolist() == [4, 10, 22]
    assert rows.sequence_of().view(rows.shape)[rows.mask()].tolist() == [0] * 5 + [1] + [2] * 3
    for got in rows.sequences(rows.position_ids()):
        assert got.tolist() == list(range(len(got)))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4))
def test_any_rows_against_a_loop_over_places(drawn: list[tuple[int, int]]) -> None:
    """Rows of padding alone too, wherever they stand."""
    mask = torch.zeros(len(drawn), COLUMNS, dtype=torch.bool)
    last, owner = torch.zeros_like(mask), torch.zeros(mask.shape, dtype=torch.int64)
    for row, (tokens, before) in enumerate(drawn):
        for column in range(before, before + tokens):
            mask[row, column], owner[row, column] = True, row
            last[row, column] = column == before + tokens - 1
    rows = Rows.padded(mask)
    assert torch.equal(rows.mask(), mask)
    assert torch.equal(rows.without_last(), mask & ~last)
    assert torch.equal(rows.sequence_of().view(mask.shape), owner)
    assert rows.places().tolist() == mask.flatten().nonzero()[:, 0].tolist()


def test_padding_behind_packed_sequences_is_a_sequence_of_its_own() -> None:
    assert LAYOUTS["packed and padded"].position_ids()[0, 9:].tolist() == list(range(7))
    assert LAYOUTS["packed"].position_ids().tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_routes_stand_at_the_places_of_their_tokens(name: str) -> None:
    rows = LAYOUTS[name]
    records = [record(tokens, seed) for seed, tokens in enumerate(sequences())]
    check_rows(records, rows, placed(rows, sequences()), None)
    first, second = (cut(records, rows, LAYERS, E, K) for cut in (placed_routes, sliced_routes))
    for layer, column in zip(LAYERS, (0, 1), strict=True):
        got = first[layer].view(*rows.shape, K)
        assert torch.equal(got.flatten(0, 1), second[layer])
        for ids, one in zip(rows.sequences(got), records, strict=True):
            if one is not None:
                assert ids[:-1].tolist() == one.experts[:, column].tolist()
        assert not got[~rows.without_last()].any()


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_without_routes_are_found(name: str) -> None:
    rows = LAYOUTS[name]
    records = [record(tokens, seed) for seed, tokens in enumerate(sequences())]
    assert uncovered(records, rows) is None
    assert records[2] is not None
    records[2] = records[2].uncover(np.array([False, True]))
    free = uncovered(records, rows)
    assert free is not None
    assert placed(rows, sequences()).flatten()[free].tolist() == [21]
    with pytest.raises(RouteError, match="no recorded routes"):
        check_rows(records, rows, placed(rows, sequences()), None)
    check_rows(records, rows, placed(rows, sequences()), None, "native")


@pytest.mark.parametrize(
    "change", ["swapped", "other token", "other last token", "too few", "none", "padding", "a row less", "no digest"]
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_records_of_other_tokens_are_refused(name: str, change: str) -> None:
    rows, parts, reason = LAYOUTS[name], sequences(), "rows"
    records: list[Any] = [record(tokens, seed) for seed, tokens in enumerate(parts)]
    if change == "swapped":
        records[0], records[2] = records[2], records[0]
    elif change == "other token":
        parts[0][1], reason = 7, "digest"
    elif change == "other last token":
        parts[2][2], reason = 7, "digest"
    elif change == "too few":
        records = records[:2]
    elif change == "none":
        records[2] = None
    elif change == "padding":
        records[1] = records[0]
    elif change == "a row less":
        records[2] = replace(records[2], experts=records[2].experts[1:])
    elif change == "no digest":
        records[2], reason = replace(records[2], token_digest=None), "digest"
    with pytest.raises(RouteError) as error:
        check_rows(records, rows, placed(rows, parts), None)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ("right_padded", ("xx.", ".xx")),
        ("right_padded", ("x.x",)),
        ("left_padded", (".xx", "xx.")),
        ("left_padded", ("x.x",)),
        ("padded", ("xxx", "x.x")),
    ],
)
def test_tokens_elsewhere_are_refused(layout: str, rows: tuple[str, ...]) -> None:
    with pytest.raises(RouteError, match="tokens do not stand where the layout says") as error:
        getattr(Rows, layout)(mask(*rows))
    assert error.value.reason == "rows"
    assert error.value.where == f"row {len(rows) - 1}"


@pytest.mark.parametrize("layout", ["right_padded", "left_padded", "padded"])
def test_rows_of_padding_alone_and_masks_of_numbers(layout: str) -> None:
    rows = getattr(Rows, layout)(mask("...", "xxx").long())
    assert rows.lengths == (0, 3)
    check_rows([None, record(np.arange(3), 0)], rows, torch.tensor([[9, 9, 9], [0, 1, 2]]), None)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_last_token_of_a_sequence_is_its_last_target(name: str) -> None:
    rows, wholes = LAYOUTS[name], [np.arange(length + 1) + 10 * index for index, length in enumerate(LENGTHS)]
    records = [record(tokens, seed) for seed, tokens in enumerate(wholes)]
    inputs, targets = (placed(rows, [tokens[part] for tokens in wholes]) for part in (slice(-1), slice(1, None)))
    check_rows(records, rows, inputs, targets)
    for index, place in enumerate(torch.tensor(LENGTHS).cumsum(0).tolist()):
        wrong = targets.clone().flatten()
        wrong[rows.places()[place - 1]] += 1
        with pytest.raises(RouteError, match=f"row {index} of") as error:
            check_rows(records, rows, inputs, wrong.view(rows.shape))
        assert error.value.reason == "digest"
    for pair in ((inputs[:, 1:], targets), (inputs, targets[:, 1:])):
        with pytest.raises(RouteError) as error:
            check_rows(records, rows, *pair)
        assert error.value.reason == "shape"


@pytest.mark.parametrize("wrong", [torch.ones(1, 1, 3, 3), torch.ones(3), torch.tensor([[0, 2, 1]])])
def test_what_is_no_mask_of_tokens_is_refused(wrong: Tensor) -> None:
    with pytest.raises(RouteError):
        Rows.padded(wrong)


@pytest.mark.parametrize(
    ("offsets", "columns", "reason"),
    [
        ([0], None, "shape"),
        ([0.0, 2.0], None, "shape"),
        ([[0, 2]], None, "shape"),
        ([1, 2], None, "rows"),
        ([0, 2, 2], None, "rows"),
        ([0, 3, 2], None, "rows"),
        ([0, 3], 2, "rows"),
    ],
)
def test_offsets_that_do_not_describe_a_row_are_refused(offsets: object, columns: int | None, reason: str) -> None:
    with pytest.raises(RouteError) as error:
        Rows.packed(torch.tensor(offsets), columns)
    assert error.value.reason == reason


def test_tensors_of_another_shape_are_refused() -> None:
    with pytest.raises(RouteError) as error:
        LAYOUTS["packed"].sequences(torch.zeros(3, 3))
    assert error.value.reason == "shape"


def test_layouts_with_the_same_mask_are_told_apart() -> None:
    """Two sequences and one of their length give attention other limits."""
    two, one = Rows.packed(torch.tensor([0, 2, 4])), Rows.packed(torch.tensor([0, 4]))
    assert torch.equal(two.mask(), one.mask())
    assert two.digest() != one.digest()
