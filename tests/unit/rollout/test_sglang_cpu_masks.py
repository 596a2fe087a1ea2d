"""The CPU support package packs the sampling masks of a batch as SGLang's loops do, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.masks import Rows, wrap_building, wrap_sharing

VOCAB = 40


def sampler(most: int = VOCAB) -> Any:
    return SimpleNamespace(sampling_mask_max_tokens=most, tp_sync_group=None, cp_sync_group=None)


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


def built(found: Any, most: int = VOCAB, rows: torch.Tensor | None = None) -> Any:
    """The answer of the wrapped function; None where it asks SGLang."""
    build = wrap_building(lambda *_: None, SimpleNamespace)
    support = torch.arange(len(found.weights)) if rows is None else rows
    return build(sampler(most), torch.zeros(len(found.weights)), found, support)


def test_the_packed_support_is_that_of_each_row_alone() -> None:
    """Long supports beside short ones, and one of a single id."""
    kept = [1, 7, VOCAB, 3, 12, 1, 20]
    found = capture(kept)
    packed = built(found)
    assert packed.lengths.tolist() == kept
    assert packed.statuses.tolist() == [0] * len(kept)
    for row, length in enumerate(kept):
        weights = found.weights[row]
        support = weights > 0
        mass = torch.where(support, weights, torch.zeros_like(weights)).sum(dtype=torch.float32)
        assert torch.equal(packed.token_ids[row, :length], found.token_ids[row, :length])
        assert torch.equal(packed.support_logprobs[row, :length], torch.log(weights / mass)[:length])
        assert torch.equal(packed.selected_logprobs[row], torch.log(found.selected_weight[row] / mass))


def test_packed_tensors_end_with_the_longest_support() -> None:
    assert built(capture([2, 5, 3])).support_logprobs.shape == (3, 5)


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
    assert built(capture([2, 5, 3], token_ids=None)) is None, "weights in no order"
    assert built(capture([2, 5, 3], selected_weight=None)) is None, "a token that another rank may have chosen"
    assert built(capture([2, 5, 3], weights=whole.weights.double())) is None
    build = wrap_building(lambda *_: None, SimpleNamespace)
    assert build(sampler(), torch.zeros(3), whole, None) is None, "no request wants the support"


def share(packed: Any, num_requests: int) -> Any:
    """The output after the wrapped function; a list where it asked SGLang."""
    asked: list[Any] = []
    output = SimpleNamespace(sampling_mask_output=packed)
    wrap_sharing(lambda *arguments: asked.append(arguments))([object()] * num_requests, output)
    return asked or output


def packed_of(found: Any) -> Any:
    packed = built(found)
    packed.num_accept_tokens = None
    return packed


def test_every_request_gets_its_own_rows() -> None:
    kept = [4, 1, 9]
    packed = packed_of(capture(kept))
    output = share(packed, 3)
    assert output.sampling_mask_output is None
    assert output.next_token_sampling_mask_status == [0, 0, 0]
    for row, length in enumerate(kept):
        rows = Kept()
        rows.append(output.next_token_sampling_mask_idx[row], output.next_token_sampling_logprobs[row])
        chunk = rows.take()
        assert chunk.lengths.tolist() == [length]
        assert chunk.token_ids.tobytes() == packed.token_ids[row, :length].numpy().tobytes()
        assert chunk.logprobs.tobytes() == packed.support_logprobs[row, :length].numpy().tobytes()


def test_masks_of_unusual_batches_are_shared_out_by_sglang() -> None:
    packed = packed_of(capture([4, 1, 9]))
    assert isinstance(share(packed, 4), list), "a request without a mask among them"
    for other in (
        {"num_accept_tokens": torch.tensor([1, 1, 1])},
        {"support_logprobs": None},
        {"statuses": torch.tensor([0, 2, 0])},
    ):
        assert isinstance(share(SimpleNamespace(**(vars(packed) | other)), 3), list), other
    assert share(None, 3).sampling_mask_output is None
    wrap_sharing(lambda *_: pytest.fail("there is nothing to do"))([], None)


class Kept(Rows):  # type: ignore[misc]
    """With a chunk of plain values."""

    chunk = SimpleNamespace


@pytest.mark.parametrize("num_rows", [0, 1, 5, 700])
def test_rows_are_those_that_were_queued(num_rows: int) -> None:
    """Of a batch at once and of one that SGLang shared out, in turn."""
    rows, batch = Kept(), np.arange(4000, dtype=np.int32)
    expected = [batch[number : number + number % 4 + 1] for number in range(num_rows)]
    for number, row in enumerate(expected):
        queue(rows, row, together=bool(number % 3))
    for _ in range(2):
        assert_same(rows.view(), expected)
    chunk = rows.take()
    queue(rows, batch[:2], together=True)
    assert_same(chunk, expected)
    assert_same(rows.take(), [batch[:2]])
    assert_same(rows.take(), [])


def queue(rows: Rows, ids: np.ndarray, *, together: bool) -> None:
    """Ids whose log-probs are the same numbers."""
    both = ids, ids.astype(np.float32)
    if not together:
        rows.append(*both)
        return
    packed = SimpleNamespace(
        token_ids=torch.from_numpy(ids)[None],
        support_logprobs=torch.from_numpy(both[1])[None],
        lengths=torch.tensor([len(ids)], dtype=torch.int32),
        statuses=torch.zeros(1, dtype=torch.int32),
        num_accept_tokens=None,
    )
    output = share(packed, 1)
    rows.append(output.next_token_sampling_mask_idx[0], output.next_token_sampling_logprobs[0])


def assert_same(chunk: Any, expected: Sequence[np.ndarray]) -> None:
    flat = [number for row in expected for number in row.tolist()]
    assert chunk.lengths.tolist() == [len(row) for row in expected]
    assert chunk.token_ids.tolist() == flat
    assert chunk.logprobs.tolist() == flat
    assert (chunk.lengths.dtype, chunk.token_ids.dtype, chunk.logprobs.dtype) == (np.int32, np.int32, np.float32)
