"""Attention inside of each sequence of a pack against plain softmax with a mask of the whole pack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_trm.learner import sequence_attention
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


@pytest.fixture(params=[256, 5, 0], ids=["by octave", "short ones by octave", "one by one"])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """`TOGETHER`."""
    monkeypatch.setattr(sequence_attention, "TOGETHER", request.param)
    sequence_attention.calls.cache_clear()
    yield request.param
    sequence_attention.calls.cache_clear()


def test_calls_have_rows_of_like_lengths(together: int) -> None:
    expected = {
        256: [(3, 7), (1, 1), (1, 12)],
        5: [(1, 7), (1, 1), (2, 5), (1, 12)],
        0: [(1, 7), (1, 1), (1, 4), (1, 12), (1, 5)],
    }
    assert sequence_attention.calls(LENGTHS)[0] == expected[together]


@pytest.mark.usefixtures("together")
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


def test_scores_and_gradients_come_from_the_same_bits() -> None:
    """A pass without gradients and one with them are the two sides of a ratio that is 1."""
    with torch.no_grad():
        scored = attend_within(*tensors(), LENGTHS, KINDS["causal"])
    assert torch.equal(attend_within(*tensors(), LENGTHS, KINDS["causal"]), scored)
