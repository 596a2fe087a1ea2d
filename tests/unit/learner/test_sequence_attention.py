"""Attention inside of each sequence of a pack against plain softmax with a mask of the whole pack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_trm.learner import batched_attention, sequence_attention
from moe_trm.learner.sequence_attention import AttentionKind, attend, attend_within

LENGTHS = (7, 1, 4, 12, 5)
T, N, G, D = sum(LENGTHS), 4, 2, 6
SCALE = 0.3
KINDS = {
    "causal": AttentionKind(SCALE),
    "window": AttentionKind(SCALE, columns_before=3),
    "sinks": AttentionKind(SCALE, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "sinks and window": AttentionKind(SCALE, columns_before=2, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


def tensors(value_dim: int = D) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (T, N, D), (T, G, D), (T, G, value_dim)
    query, key, value = (torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)
    return query, key, value


def by_mask(query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
    """The same in float64 with one mask `[T, T]`."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(N // G, 1) for x in (key, value))
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    before = torch.arange(T)[:, None] - torch.arange(T)[None]
    seen = (owner[:, None] == owner[None]) & (before >= 0)
    if kind.columns_before is not None:
        seen &= before <= kind.columns_before
    logits = torch.einsum("tnd,snd->nts", query, key) * kind.scale
    logits = logits.masked_fill(~seen, -torch.inf)
    if kind.sinks is not None:
        logits = torch.cat([logits, kind.sinks.double()[:, None, None].expand(-1, T, 1)], -1)
    return torch.einsum("nts,snd->tnd", logits.softmax(-1)[..., :T], value)


GROUPINGS = {
    "one call": (256, 10000),
    "by octave": (256, 0),
    "short ones by octave": (5, 0),
    "one by one": (0, 0),
}
"""`TOGETHER` and `CALL`."""


@pytest.fixture
def grouped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls as `GROUPINGS` has them."""
    together, call = GROUPINGS[request.param]
    monkeypatch.setattr(sequence_attention, "TOGETHER", together)
    monkeypatch.setattr(sequence_attention, "CALL", call)
    sequence_attention._calls.cache_clear()
    yield
    sequence_attention._calls.cache_clear()


@pytest.fixture(params=[0, 128], ids=["by kernel", "in products"])
def batched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any length through torch's kernel, and through batched products where these know the kind."""
    monkeypatch.setattr(sequence_attention, "BATCHED", request.param)


@pytest.mark.parametrize(
    ("grouped", "shapes"),
    [
        ("one call", [(5, 12)]),
        ("by octave", [(3, 7), (1, 1), (1, 12)]),
        ("short ones by octave", [(1, 7), (1, 1), (2, 5), (1, 12)]),
        ("one by one", [(1, 7), (1, 1), (1, 4), (1, 12), (1, 5)]),
    ],
    indirect=["grouped"],
)
@pytest.mark.usefixtures("grouped")
def test_calls_have_rows_of_like_lengths(shapes: list[tuple[int, int]]) -> None:
    assert list(sequence_attention._calls(LENGTHS).shapes) == shapes


def test_shorter_sequences_join_a_call_while_that_is_cheaper() -> None:
    """Fillers of 30 rows of 8 in a call of 36 have 30 * (36**2 - 8**2) pairs of columns: more than a call."""
    few, many = (36, *[8] * 20), (36, *[8] * 30)
    assert 20 * (36**2 - 8**2) < sequence_attention.CALL < 30 * (36**2 - 8**2)
    assert sequence_attention._calls(few).shapes == ((21, 36),)
    assert sequence_attention._calls(many).shapes == ((27, 36), (4, 8))


@pytest.mark.parametrize("grouped", GROUPINGS, indirect=True)
@pytest.mark.usefixtures("grouped", "batched")
@pytest.mark.parametrize("value_dim", [D, D + 2])
@pytest.mark.parametrize("name", KINDS)
def test_sequences_see_themselves_alone(name: str, value_dim: int) -> None:
    ours, theirs = tensors(value_dim), tensors(value_dim)
    got, expected = attend_within(*ours, LENGTHS, KINDS[name]), by_mask(*theirs, KINDS[name])
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=1e-6)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_a_part_of_the_columns_asks_the_whole_sequence(name: str) -> None:
    """As context-parallel ranks do, which hold columns in another order."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(12, N, D, generator=generator) for _ in range(3))
    query, key, value = query[None], key[None], value[None]
    whole = attend(query, key, value, KINDS[name])
    order = torch.randperm(12, generator=generator)
    own = torch.tensor([0, 1, 2, 9, 10, 11])
    part = attend(query[:, own], key[:, order], value[:, order], KINDS[name], own[:, None] - order[None])
    torch.testing.assert_close(part, whole[:, own], atol=1e-6, rtol=1e-6)


def test_batched_products_are_for_short_rows_of_plain_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def attend_blocks(query: Tensor, *_others: object) -> Tensor:
        asked.append(len(query))
        return query

    monkeypatch.setattr(sequence_attention, "attend_blocks", attend_blocks)
    short, long = LENGTHS, (sequence_attention.BATCHED + 1, 3)
    for lengths, dtype, name in (
        (short, torch.float32, "causal"),
        (short, torch.bfloat16, "causal"),
        (short, torch.float32, "sinks"),
        (long, torch.float32, "causal"),
    ):
        query, key, value = (torch.zeros(sum(lengths), count, D, dtype=dtype) for count in (N, G, G))
        attend_within(query, key, value, lengths, KINDS[name])
    assert asked == [T]


def test_scores_and_gradients_come_from_the_same_bits() -> None:
    """A pass without gradients and one with them are the two sides of a ratio that is 1."""
    with torch.no_grad():
        scored = attend_within(*tensors(), LENGTHS, KINDS["causal"])
    assert torch.equal(attend_within(*tensors(), LENGTHS, KINDS["causal"]), scored)


def test_blocks_give_every_token_a_place_for_each_key_head() -> None:
    calls = sequence_attention._calls((36, *[8] * 30))
    blocks = batched_attention.blocks_of(calls.shapes, calls.tokens, calls.places, calls.fillers, G)
    tokens = torch.arange(len(calls.places) * G)
    assert torch.equal(blocks.tokens[blocks.places], tokens)
    assert sorted((*blocks.places.tolist(), *blocks.fillers.tolist())) == list(range(len(blocks.tokens)))
    # In the order [B, G, C]: the columns of a row are neighbours, once for each head.
    assert blocks.tokens[:36].tolist() == [*range(0, 72, 2)]
    assert blocks.tokens[36:72].tolist() == [*range(1, 72, 2)]
