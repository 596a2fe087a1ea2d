"""Log-probs over the whole vocabulary that never hold it. Shape letters: N tokens, H hidden size, V vocabulary (rows held here), C tokens of a chunk.

Logits exist for one chunk of tokens at a time, in one buffer that all chunks share, and are recomputed in the backward pass.
Everything is float32 (float64 for float64 inputs); a weight of another dtype is converted once. The same code runs on CUDA, where
every step is a library kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_trm.sampling_mask.support import compute_dtype
from moe_trm.sampling_mask.vocabulary import WHOLE, Vocabulary

CHUNK_LOGITS = 2**25
"""Logits that live at once: 128 MiB of float32."""


@dataclass(frozen=True)
class FullScores:
    """What one pass over the vocabulary says of each token; what was not asked for is None.

    Attributes:
        logprobs: `[N]` of the targets, with gradient.
        entropy: `[N]` nats, with gradient: -sum_v p_v log p_v.
        sum_of_squares: `[N]` sum_v p_v^2, without gradient.
        top_ids, top_logprobs: `[N, k]` the likeliest ids, most likely first, and their log-probs, without gradient.
    """

    logprobs: Tensor
    entropy: Tensor | None
    sum_of_squares: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None


def full_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """Log-prob of each target over the whole vocabulary, `[N]`, differentiable in `hidden_NH` and `weight_VH`.

    log p(y) = z_y / tau - log sum_v exp(z_v / tau),  z = W h.

    Args:
        hidden_NH: last hidden states, any float dtype.
        weight_VH: output embedding; with a group in `vocabulary`, this rank's rows of it.
        target_N: int64 ids.
        temperature: tau.
        chunk_tokens: tokens whose logits exist at once; None: what fits `CHUNK_LOGITS`.
        vocabulary: the ids that the weight's rows stand for.

    Returns:
        `[N]` float32 (float64 for float64 hidden states), in nats.
    """
    return full_scores(hidden_NH, weight_VH, target_N, temperature, chunk_tokens, vocabulary).logprobs


def full_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    vocabulary: Vocabulary = WHOLE,
    *,
    entropy: bool = False,
    sum_of_squares: bool = False,
    top_k: int = 0,
) -> FullScores:
    """`full_logprobs`, and in the same pass the entropy, the sum of squared probabilities and the `top_k` likeliest ids."""
    wanted = _Wanted(temperature, chunk_tokens, vocabulary, entropy, sum_of_squares, top_k)
    logprobs, entropies, squares, top_ids, top_logprobs = _FullScores.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, target_N, wanted
    )
    return FullScores(
        logprobs,
        entropies if entropy else None,
        squares if sum_of_squares else None,
        top_ids if top_k else None,
        top_logprobs if top_k else None,
    )


@torch.no_grad()
def log_normalizer(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """`[N]` log sum_v exp(z_v / tau), without gradient."""
    out = hidden_NH.new_empty(hidden_NH.shape[0], dtype=compute_dtype(hidden_NH))
    for chunk, logits_CV in _logits(hidden_NH, weight_VH, temperature, chunk_tokens, vocabulary):
        top_C1 = vocabulary.max(logits_CV.amax(dim=1, keepdim=True))
        sums_C = vocabulary.sum(logits_CV.sub_(top_C1).exp_().sum(dim=1))
        out[chunk] = top_C1[:, 0] + sums_C.log()
    return out


@dataclass(frozen=True)
class _Wanted:
    temperature: float
    chunk_tokens: int | None
    vocabulary: Vocabulary
    entropy: bool
    sum_of_squares: bool
    top_k: int


def _logits(
    hidden_NH: Tensor, weight_VH: Tensor, temperature: float, chunk_tokens: int | None, vocabulary: Vocabulary
) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of tokens with their logits / tau, in a buffer that the next chunk overwrites and the caller may write to."""
    weight = vocabulary.real_rows(weight_VH).to(compute_dtype(hidden_NH))
    num_tokens, size = hidden_NH.shape[0], chunk_tokens or max(1, CHUNK_LOGITS // len(weight))
    buffer = weight.new_empty(min(size, num_tokens), len(weight))
    for start in range(0, num_tokens, size):
        chunk = slice(start, min(start + size, num_tokens))
        hidden = hidden_NH[chunk].to(weight.dtype)
        logits = torch.mm(hidden, weight.T, out=buffer[: len(hidden)])
        yield chunk, logits if temperature == 1.0 else logits.div_(temperature)


def _rows_here(target_C: Tensor, num_rows: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Tokens of the chunk whose target is held here, and its row."""
    rows = target_C - vocabulary.first
    tokens = ((rows >= 0) & (rows < num_rows)).nonzero()[:, 0]
    return tokens, rows[tokens]


class _FullScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, wanted: _Wanted
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        n, ranges = hidden_NH.shape[0], wanted.vocabulary
        logprobs, log_norm, entropies, squares = (
            hidden_NH.new_zeros(n, dtype=compute_dtype(hidden_NH)) for _ in range(4)
        )
        top_ids = target_N.new_zeros(n, wanted.top_k)
        top_logprobs = logprobs.new_zeros(n, wanted.top_k)
        for chunk, logits_CV in _logits(hidden_NH, weight_VH, wanted.temperature, wanted.chunk_tokens, ranges):
            tokens, rows = _rows_here(target_N[chunk], logits_CV.shape[1], ranges)
            chosen_C = logits_CV.new_zeros(len(logits_CV))
            chosen_C[tokens] = logits_CV[tokens, rows]
            if wanted.top_k:
                top_ids[chunk], top_logprobs[chunk] = _top(logits_CV, wanted.top_k, ranges)
            top_C1 = ranges.max(logits_CV.amax(dim=1, keepdim=True))
            logits_CV.sub_(top_C1)
            powers_CV = logits_CV.exp() if wanted.entropy else logits_CV.exp_()
            sums_C = ranges.sum(powers_CV.sum(dim=1))
            log_norm[chunk] = top_C1[:, 0] + sums_C.log()
            logprobs[chunk] = ranges.sum(chosen_C)
            if wanted.entropy:
                # exp(-inf) * -inf would be NaN: an id of probability zero adds nothing.
                product_C = torch.linalg.vecdot(powers_CV, logits_CV.nan_to_num_(neginf=0.0))
                entropies[chunk] = sums_C.log() - ranges.sum(product_C) / sums_C
            if wanted.sum_of_squares:
                squares[chunk] = ranges.sum(torch.linalg.vecdot(powers_CV, powers_CV)) / sums_C.square()
        logprobs -= log_norm
        top_logprobs -= log_norm[:, None]
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, log_norm, entropies)
        ctx.wanted = wanted
        ctx.mark_non_differentiable(squares, top_ids, top_logprobs)
        return logprobs, entropies, squares, top_ids, top_logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, grad_entropy_N: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_N, log_norm, entropies = ctx.saved_tensors
        wanted, dtype = ctx.wanted, log_norm.dtype
        real_VH = wanted.vocabulary.real_rows(weight_VH).to(dtype)
        grad_hidden = torch.zeros_like(hidden_NH, dtype=dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VH, dtype=dtype) if ctx.needs_input_grad[1] else None
        scaled_N = grad_N / wanted.temperature
        for chunk, logits_CV in _logits(
            hidden_NH, weight_VH, wanted.temperature, wanted.chunk_tokens, wanted.vocabulary
        ):
            logits_CV.sub_(log_norm[chunk, None])
            tokens, rows = _rows_here(target_N[chunk], logits_CV.shape[1], wanted.vocabulary)
            factor = -scaled_N[chunk, None]
            if wanted.entropy:
                # d entropy / d z_j = -p_j (log p_j + entropy) / tau
                slope = grad_entropy_N[chunk, None] / wanted.temperature
                factor = factor - slope * (logits_CV.nan_to_num(neginf=0.0) + entropies[chunk, None])
            grad_CV = logits_CV.exp_().mul_(factor)
            grad_CV[tokens, rows] += scaled_N[chunk][tokens]
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_CV @ real_VH
            if grad_weight is not None:
                grad_weight[: len(real_VH)].addmm_(grad_CV.T, hidden_NH[chunk].to(dtype))
        if grad_hidden is not None:
            grad_hidden = wanted.vocabulary.sum(grad_hidden)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            None,
            None,
        )


def _top(logits_CV: Tensor, k: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Ids and logits of the `k` likeliest over all ranges."""
    values, rows = logits_CV.topk(min(k, logits_CV.shape[1]), dim=1)
    ids = rows + vocabulary.first
    if vocabulary.group is not None:
        values, ids = vocabulary.gather(values), vocabulary.gather(ids)
        values, places = values.topk(k, dim=1)
        ids = ids.gather(1, places)
    return ids, values
