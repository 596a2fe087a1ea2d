"""The CPU support package packs the sampling masks of a batch as SGLang's loops do, bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.masks import (
    Chunk,
    Rows,
    Shared,
    pairs_of,
    wrap_adding,
    wrap_building,
    wrap_places,
    wrap_sharing,
)

VOCAB = 40


def sampler(most: int = VOCAB) -> Any:
    return SimpleNamespace(sampling_mask_max_tokens=most)


def capture(kept: Sequence[int], seed: int = 0, **other: Any) -> Any:
    """Sorted weights as SGLang's sampler leaves them: those behind the support are 0. The third token is sampled."""
    generator = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(len(kept), VOCAB, generator=generator).softmax(-1).sort(descending=True)
    weights[torch.arange(VOCAB) >= torch.tensor(kept)[:, None]] = 0.0
    place = torch.tensor(kept).clamp(max=3)[:, None] - 1
    found = {
        "weights": weights,
        "token_ids": ids.to(torch.int32),
        "selected_weight": weights.gather(1, place).view(-1),
        "batch_rows": torch.arange(len(kept)),
    }
    return SimpleNamespace(**(found | other))


def built(found: Any, most: int = VOCAB, rows: torch.Tensor | None = None, num_requests: int | None = None) -> Any:
    """The answer of the wrapped function; None where it asks SGLang."""
    build = wrap_building(lambda *_: None)
    support = torch.arange(len(found.weights)) if rows is None else rows
    return build(sampler(most), torch.zeros(num_requests or len(found.weights)), found, support)


def test_the_packed_support_is_that_of_each_row_alone() -> None:
    """Long supports beside short ones, and one of a single id."""
    kept = [1, 7, VOCAB, 3, 12, 1, 20]
    found = capture(kept)
    packed = built(found)
    for row, length in enumerate(kept):
        weights = found.weights[row]
        support = weights > 0
        mass = torch.where(support, weights, torch.zeros_like(weights)).sum(dtype=torch.float32)
        logprobs = torch.log(weights / mass)[:length]
        assert packed.parts[row] == pairs_of(found.token_ids[row, :length].numpy(), logprobs.numpy())
    packed.map_device_tensors(lambda _: pytest.fail("bytes have no device"))


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf"), -0.1])
def test_one_impossible_weight_leaves_the_batch_to_sglang(wrong: float) -> None:
    selected = capture([2, 5, 3])
    selected.selected_weight[1] = wrong
    assert built(selected) is None
    if wrong != 0.0:
        summed = capture([2, 5, 3])
        summed.weights[1] = wrong
        assert built(summed) is None


def test_unusual_batches_are_sglangs() -> None:
    whole = capture([2, 5, 3])
    assert built(whole, most=5) is not None
    assert built(whole, most=4) is None, "a support beyond the limit"
    assert built(whole, rows=torch.tensor([0, 2])) is None, "a request that wants one log-prob alone"
    assert built(whole, num_requests=4) is None, "a request without a mask among them"
    assert built(capture([2, 5, 3], token_ids=None)) is None, "weights in no order"
    assert built(capture([2, 5, 3], selected_weight=None)) is None, "a token that another rank may have chosen"
    assert built(capture([2, 5, 3], weights=whole.weights.double())) is None
    assert built(capture([2, 5, 3], token_ids=whole.token_ids.long())) is None
    build = wrap_building(lambda *_: None)
    assert build(sampler(), torch.zeros(3), whole, None) is None, "no request wants the support"


def share(packed: Any, num_requests: int) -> Any:
    """The output after the wrapped function; a list where it asked SGLang."""
    asked: list[Any] = []
    output = SimpleNamespace(sampling_mask_output=packed)
    wrap_sharing(lambda *arguments: asked.append(arguments))([object()] * num_requests, output)
    return asked or output


def test_every_request_gets_its_own_rows() -> None:
    packed = built(capture([4, 1, 9]))
    output = share(packed, 3)
    assert output.sampling_mask_output is None
    assert output.next_token_sampling_mask_status == [0, 0, 0]
    add = wrap_adding(lambda *_, **__: pytest.fail("nothing is left for SGLang"))
    for row, part in enumerate(packed.parts):
        req = SimpleNamespace(sampling_mask_rows=Kept())
        add(None, row, req, output)
        assert req.sampling_mask_rows.parts == [part]


def test_masks_that_sglang_packed_are_shared_out_by_sglang() -> None:
    assert isinstance(share(SimpleNamespace(statuses=torch.tensor([0, 2])), 2), list)
    assert isinstance(share(None, 3), list)
    asked: list[Any] = []
    add = wrap_adding(lambda *arguments, **others: asked.append((arguments, others)))
    output = SimpleNamespace(next_token_sampling_mask_idx=[np.arange(3), [np.arange(2)]])
    for row in (0, 1):
        add("processor", row, "request", output, accept_len=1)
    assert asked == [(("processor", row, "request", output), {"accept_len": 1}) for row in (0, 1)]


class Plain:
    """Rows as SGLang keeps them: all in one chunk."""

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], list[float]]] = []

    def append(self, kept: np.ndarray, logprobs: np.ndarray) -> None:
        self.rows.append((kept.tolist(), logprobs.tolist()))

    def take(self) -> list[tuple[list[int], list[float]]]:
        return self.rows


class Kept(Rows):  # type: ignore[misc]
    """As the plugin makes it."""

    native = Plain


def pairs(ids: np.ndarray) -> bytes:
    """Ids whose log-probs are the same numbers."""
    packed: bytes = pairs_of(ids, ids.astype(np.float32))
    return packed


@pytest.mark.parametrize("num_rows", [0, 1, 5, 700])
def test_rows_are_those_that_were_queued(num_rows: int) -> None:
    rows, batch = Kept(), np.arange(4000, dtype=np.int32)
    expected = [batch[number : number + number % 4 + 1] for number in range(num_rows)]
    rows.parts += [pairs(row) for row in expected]
    for _ in range(2):
        assert_same(rows.view(), expected)
    chunk = rows.take()
    rows.parts.append(pairs(batch[:2]))
    assert_same(chunk, expected)
    assert_same(pickle.loads(pickle.dumps(rows.take())), [batch[:2]])
    empty = rows.take()
    assert_same(empty, [])
    assert empty.to_lists(support_logprobs=False) == ([], [])


def assert_same(chunk: Chunk, expected: Sequence[np.ndarray]) -> None:
    rows = [row.tolist() for row in expected]
    assert chunk.to_lists(support_logprobs=True) == (rows, rows)
    flat = [number for row in rows for number in row]
    assert chunk.lengths.tolist() == [len(row) for row in expected]
    assert chunk.token_ids.tolist() == flat
    assert chunk.logprobs.tolist() == flat
    assert (chunk.lengths.dtype, chunk.token_ids.dtype, chunk.logprobs.dtype) == (np.int32, np.int32, np.float32)


def test_a_request_that_sglang_packed_once_is_sglangs() -> None:
    """Rows of a batch at once and of one that SGLang shared out, in turn; and one log-prob for each token alone."""
    rows, ids = Kept(), np.arange(6, dtype=np.int32)
    rows.parts.append(pairs(ids[:3]))
    rows.append(ids[3:5], np.array([3.0, 4.0], np.float32))
    rows.append(ids[2:6], np.array([7.0], np.float32))
    rows.parts.append(pairs(ids[5:]))
    assert rows.take() == [
        ([0, 1, 2], [0.0, 1.0, 2.0]),
        ([3, 4], [3.0, 4.0]),
        ([2, 3, 4, 5], [7.0]),
        ([5], [5.0]),
    ]
    assert_same(rows.take(), [])


def test_places_of_a_batch_that_wants_all_are_counted() -> None:
    asked: list[Any] = []
    places = wrap_places(lambda *flags: asked.append(flags))
    for number in (3, 1, 200, 3):
        found = places([True] * number, [True] * number, "cpu")
        assert torch.equal(found, torch.arange(number))
        assert torch.equal(places([True] * number, "cpu"), found)
    assert not asked
    for flags in (
        ([True, False], "cpu"),
        ([True], None, "cpu"),
        ([True], [False], "cpu"),
        ([], "cpu"),
        ([True], "cuda"),
    ):
        assert places(*flags) is None
    assert len(asked) == 5


def test_a_part_of_the_batch_stands_for_ids_and_log_probs() -> None:
    output = share(Shared([b"12345678", b""]), 2)
    assert output.next_token_sampling_mask_idx is output.next_token_sampling_logprobs
