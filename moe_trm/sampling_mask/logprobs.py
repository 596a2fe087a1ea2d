"""Log-probs of sampled tokens, over the kept support of a sampling mask or over the whole vocabulary.

Shape letters: N sampled tokens, H hidden size, V vocabulary, M kept ids in all, O = N + 1 offsets.

A kept support is compressed sparse rows: token `n` keeps `kept_ids[kept_offsets[n]:kept_offsets[n + 1]]`. Work and memory
follow the kept ids: rows of the output weight are gathered, and neither a `[N, V]` mask nor full logits exist. Where supports
are wide (over a quarter of the vocabulary on average) one matrix product per chunk is cheaper, and the kept logits are picked
from it. Everything is computed in float32 (float64 for float64 inputs), in chunks of tokens. Values do not depend on whether a
gradient is asked for; gathered ones do not depend on the other tokens of the batch either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_trm.errors import RecordRejected

MAX_GATHERED_ROWS = 16384


def masked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    temperature: float = 1.0,
    max_rows: int = MAX_GATHERED_ROWS,
) -> Tensor:
    """Log-prob of each target over its kept support, differentiable in `hidden_NH` and `weight_VH`.

    log p_S(y) = z_y / tau - log sum_{v in S} exp(z_v / tau),  z = W h;
    d log p_S(y) / d z_j = (1[j = y] - p_S(j)) / tau on S and 0 elsewhere (methods.md section 4).

    Args:
        hidden_NH: last hidden states, any float dtype.
        weight_VH: output embedding.
        target_N: int64 sampled ids; each must be in its own support.
        kept_ids, kept_offsets: `[M]` and `[N + 1]` int64.
        temperature: tau of the rollout.
        max_rows: weight rows gathered at once; bounds the extra memory at about `2 * max_rows * H` floats.

    Returns:
        `[N]` float32 (float64 for float64 hidden states), in nats. A single kept id gives exactly 0 with zero gradient.

    Raises:
        RecordRejected: offsets that do not fit the tokens, an empty support, or a target outside its support.
    """
    _check_support(hidden_NH.shape[0], target_N, kept_ids, kept_offsets)
    result: Tensor = _MaskedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, target_N, kept_ids, kept_offsets, temperature, max_rows
    )
    return result


@torch.no_grad()
def kept_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    temperature: float = 1.0,
    max_rows: int = MAX_GATHERED_ROWS,
) -> Tensor:
    """Log-probs of every kept id over its support, `[M]` without gradient; what `exact_kl_on_support` compares."""
    parts = [
        chunk.logits - chunk.spread(_segment_logsumexp(chunk.logits, chunk.offsets))
        for chunk in _chunks(hidden_NH, weight_VH, kept_ids, kept_offsets, temperature, max_rows)
    ]
    return torch.cat(parts) if parts else hidden_NH.new_zeros(0, dtype=_compute_dtype(hidden_NH))


@torch.no_grad()
def log_kept_mass(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    max_rows: int = MAX_GATHERED_ROWS,
) -> Tensor:
    """Log of the full-vocabulary probability of each kept support, `[N]`, at most 0: `lse_S(z / tau) - lse_V(z / tau)`.

    It is the number by which a full-vocabulary log-prob and a masked one differ, so it is the truncation part of a mismatch.
    """
    kept = [
        _segment_logsumexp(chunk.logits, chunk.offsets)
        for chunk in _chunks(hidden_NH, weight_VH, kept_ids, kept_offsets, temperature, max_rows)
    ]
    if not kept:
        return hidden_NH.new_zeros(0, dtype=_compute_dtype(hidden_NH))
    full = [
        torch.logsumexp(logits_CV, dim=-1)
        for _, _, logits_CV in _dense_logits(hidden_NH, weight_VH, temperature, chunk_tokens)
    ]
    return (torch.cat(kept) - torch.cat(full)).clamp(max=0.0)


def full_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature: float = 1.0, chunk_tokens: int = 1024
) -> Tensor:
    """Log-prob of each target over the whole vocabulary, `[N]`, differentiable in `hidden_NH` and `weight_VH`.

    log p(y) = z_y / tau - log sum_v exp(z_v / tau). Logits live for `chunk_tokens` tokens at a time and are recomputed in
    the backward pass. Arguments and dtypes as in `masked_logprobs`.
    """
    result: Tensor = _FullLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, target_N, temperature, chunk_tokens
    )
    return result


@torch.no_grad()
def exact_kl_on_support(mu_logprobs: Tensor, pi_logprobs: Tensor, offsets: Tensor) -> Tensor:
    """KL(mu || pi) of each token over its kept support, `[N]` nats, from the `[M]` log-probs of both policies.

    KL = sum_{v in S} mu_v (log mu_v - log pi_v). An id with mu = 0 adds nothing; pi = 0 < mu gives +inf. Values that
    rounding made negative become 0; NaN stays NaN. Exact for the truncated policies, not for the full ones.
    """
    dtype = _compute_dtype(mu_logprobs)
    mu, pi = mu_logprobs.to(dtype), pi_logprobs.to(dtype)
    possible = mu > float("-inf")
    gap = torch.where(possible, mu, 0.0) - torch.where(possible, pi, 0.0)
    terms = torch.where(possible | mu.isnan(), mu.exp() * torch.where(mu.isnan(), mu, gap), 0.0)
    return torch.segment_reduce(terms, "sum", offsets=offsets, initial=0.0).clamp(min=0.0)


@dataclass(frozen=True)
class _Chunk:
    """The kept logits of tokens `start:stop`, whose ids are `first:last` of the CSR arrays; `row` is the token of each."""

    start: int
    stop: int
    first: int
    last: int
    offsets: Tensor
    row: Tensor
    logits: Tensor
    wide: bool

    def spread(self, per_token: Tensor) -> Tensor:
        return per_token[self.row]


def _compute_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _check_support(num_tokens: int, target_N: Tensor, kept_ids: Tensor, kept_offsets: Tensor) -> None:
    where = "masked_logprobs"
    fits = len(kept_offsets) == num_tokens + 1 and len(target_N) == num_tokens
    if not fits or int(kept_offsets[0]) != 0 or int(kept_offsets[-1]) != len(kept_ids):
        got = f"{len(kept_offsets)} offsets, {len(target_N)} targets, {len(kept_ids)} ids"
        expected = f"{num_tokens + 1} offsets from 0 to the number of ids, {num_tokens} targets"
        raise RecordRejected(
            "mask_shape", "sampling mask does not fit the tokens", where=where, got=got, expected=expected
        )
    sizes = kept_offsets.diff()
    row = torch.repeat_interleave(sizes, output_size=len(kept_ids))
    hits = torch.zeros_like(target_N).index_add_(0, row, (kept_ids == target_N[row]).to(target_N.dtype))
    wrong = (hits != 1).nonzero()
    if len(wrong):
        position = int(wrong[0])
        raise RecordRejected(
            "mask_violation",
            "the sampled token is not exactly once in its own sampling mask",
            where=f"{where}, token {position}",
            got=f"{int(hits[position])} times among {int(sizes[position])} kept ids",
            expected="once",
            fix="reject the record where it is parsed (SamplingMask.validate)",
        )


def _chunks(
    hidden_NH: Tensor, weight_VH: Tensor, kept_ids: Tensor, kept_offsets: Tensor, temperature: float, max_rows: int
) -> Iterator[_Chunk]:
    dtype, bounds = _compute_dtype(hidden_NH), kept_offsets.cpu()
    start, num_tokens, vocabulary = 0, len(bounds) - 1, weight_VH.shape[0]
    wide = 4 * len(kept_ids) > num_tokens * vocabulary
    weight = weight_VH.to(dtype) if wide else weight_VH
    # A gathered row costs H numbers and a dense token V: the same memory either way.
    wide_tokens = max(1, max_rows * weight_VH.shape[1] // vocabulary)
    while start < num_tokens:
        first = int(bounds[start])
        fitting = int(torch.searchsorted(bounds, first + max_rows, right=True)) - 1
        stop = min(start + wide_tokens if wide else max(fitting, start + 1), num_tokens)
        last = int(bounds[stop])
        offsets = kept_offsets[start : stop + 1] - first
        row = torch.repeat_interleave(offsets.diff(), output_size=last - first)
        hidden, ids = hidden_NH[start:stop].to(dtype), kept_ids[first:last]
        logits = (hidden @ weight.T)[row, ids] if wide else torch.linalg.vecdot(weight[ids].to(dtype), hidden[row])
        yield _Chunk(start, stop, first, last, offsets, row, logits / temperature, wide)
        start = stop


def _segment_logsumexp(logits: Tensor, offsets: Tensor) -> Tensor:
    # segment_reduce sums each row alone and in order: the same bits on every call, unlike atomic additions on a GPU.
    top = torch.segment_reduce(logits, "max", offsets=offsets)
    row = torch.repeat_interleave(offsets.diff(), output_size=len(logits))
    return top + torch.segment_reduce((logits - top[row]).exp(), "sum", offsets=offsets).log()


def _dense_logits(
    hidden_NH: Tensor, weight_VH: Tensor, temperature: float, chunk_tokens: int
) -> Iterator[tuple[int, int, Tensor]]:
    weight = weight_VH.to(_compute_dtype(hidden_NH))
    for start in range(0, hidden_NH.shape[0], chunk_tokens):
        stop = min(start + chunk_tokens, hidden_NH.shape[0])
        yield start, stop, hidden_NH[start:stop].to(weight.dtype) @ weight.T / temperature


class _MaskedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        kept_ids: Tensor,
        kept_offsets: Tensor,
        temperature: float,
        max_rows: int,
    ) -> Tensor:
        out = hidden_NH.new_empty(hidden_NH.shape[0], dtype=_compute_dtype(hidden_NH))
        for chunk in _chunks(hidden_NH, weight_VH, kept_ids, kept_offsets, temperature, max_rows):
            is_target = kept_ids[chunk.first : chunk.last] == chunk.spread(target_N[chunk.start : chunk.stop])
            out[chunk.start : chunk.stop] = chunk.logits[is_target] - _segment_logsumexp(chunk.logits, chunk.offsets)
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, kept_ids, kept_offsets)
        ctx.temperature, ctx.max_rows = temperature, max_rows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_N, kept_ids, kept_offsets = ctx.saved_tensors
        dtype = _compute_dtype(hidden_NH)
        grad_hidden = torch.zeros_like(hidden_NH, dtype=dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VH, dtype=dtype) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(hidden_NH, weight_VH, kept_ids, kept_offsets, ctx.temperature, ctx.max_rows):
            ids, tokens = kept_ids[chunk.first : chunk.last], slice(chunk.start, chunk.stop)
            probs = (chunk.logits - chunk.spread(_segment_logsumexp(chunk.logits, chunk.offsets))).exp()
            is_target = (ids == chunk.spread(target_N[tokens])).to(dtype)
            grad_logits = chunk.spread(grad_N[tokens]) * (is_target - probs) / ctx.temperature
            if chunk.wide:
                dense = grad_logits.new_zeros(chunk.stop - chunk.start, len(weight_VH))
                dense[chunk.row, ids] = grad_logits
                if grad_hidden is not None:
                    grad_hidden[tokens] = dense @ weight_VH.to(dtype)
                if grad_weight is not None:
                    grad_weight.addmm_(dense.T, hidden_NH[tokens].to(dtype))
                continue
            if grad_hidden is not None:
                terms = weight_VH[ids].to(dtype).mul_(grad_logits[:, None])
                grad_hidden[tokens] = torch.segment_reduce(terms, "sum", offsets=chunk.offsets)
            if grad_weight is not None:
                terms = hidden_NH[tokens].to(dtype)[chunk.row].mul_(grad_logits[:, None])
                grad_weight.index_add_(0, ids, terms)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            *(None,) * 5,
        )


class _FullLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature: float, chunk_tokens: int
    ) -> Tensor:
        out = hidden_NH.new_empty(hidden_NH.shape[0], dtype=_compute_dtype(hidden_NH))
        for start, stop, logits_CV in _dense_logits(hidden_NH, weight_VH, temperature, chunk_tokens):
            chosen = logits_CV.gather(1, target_N[start:stop, None])[:, 0]
            out[start:stop] = chosen - torch.logsumexp(logits_CV, dim=-1)
        ctx.save_for_backward(hidden_NH, weight_VH, target_N)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_N = ctx.saved_tensors
        dtype = _compute_dtype(hidden_NH)
        weight = weight_VH.to(dtype)
        grad_hidden = torch.zeros_like(hidden_NH, dtype=dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VH, dtype=dtype) if ctx.needs_input_grad[1] else None
        for start, stop, logits_CV in _dense_logits(hidden_NH, weight_VH, ctx.temperature, ctx.chunk_tokens):
            grad_C1 = grad_N[start:stop, None] / ctx.temperature
            grad_logits = torch.softmax(logits_CV, dim=-1).mul_(-grad_C1)
            grad_logits.scatter_add_(1, target_N[start:stop, None], grad_C1)
            if grad_hidden is not None:
                grad_hidden[start:stop] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, hidden_NH[start:stop].to(dtype))
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            *(None,) * 3,
        )
