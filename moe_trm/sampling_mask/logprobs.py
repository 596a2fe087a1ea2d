"""Log-probs of sampled tokens over the kept support of a sampling mask, and the exact KL on it.

Shape letters: N sampled tokens, H hidden size, V vocabulary (rows of the weight held here), M kept ids in all,
O = N + 1 offsets.

A kept support is compressed sparse rows: token `n` keeps `kept_ids[kept_offsets[n]:kept_offsets[n + 1]]`. Work and
memory grow with the kept ids: rows of the output weight are gathered, and neither a `[N, V]` mask nor full logits
exist. Everything is computed in float32 (float64 for float64 inputs). Values do not depend on whether a gradient is
asked for. Gathered ones do not depend on the other tokens of the batch either.

With a `Vocabulary` that has a group, each rank passes its own rows of the weight and everything else whole. Results,
and gradients of the hidden states, are then those of one rank that holds every row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_trm.sampling_mask.dense import log_normalizer
from moe_trm.sampling_mask.support import (
    MAX_GATHERED_ROWS,
    Support,
    check_support,
    chunks,
    is_wide,
    kept_logits,
)
from moe_trm.sampling_mask.vocabulary import WHOLE, Vocabulary

TIED = 0.1
"""Nats within which kept ids are as unlikely as the least likely one."""


def masked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    temperature: float = 1.0,
    max_rows: int = MAX_GATHERED_ROWS,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """Log-prob of each target over its kept support, differentiable in `hidden_NH` and `weight_VH`.

    log p_S(y) = z_y / tau - log sum_{v in S} exp(z_v / tau),  z = W h;
    d log p_S(y) / d z_j = (1[j = y] - p_S(j)) / tau on S and 0 elsewhere.
    Source: keep sampling mask of DeepSeek-V3.2 (arXiv 2512.02556).

    Args:
        hidden_NH: last hidden states, any float dtype.
        weight_VH: output embedding.
        target_N: int64 sampled ids; each must be in its own support.
        kept_ids: `[M]` int64.
        kept_offsets: `[N + 1]` int64.
        temperature: tau of the rollout.
        max_rows: weight rows gathered at once; bounds the extra memory at about `2 * max_rows * H` floats.
        vocabulary: the ids that the weight's rows stand for.

    Returns:
        `[N]` float32 (float64 for float64 hidden states), in nats. A single kept id gives exactly 0 with zero gradient.

    Raises:
        RecordRejected: offsets that do not fit the tokens, an empty support, or a target outside its support.
    """
    support = (target_N, kept_ids, kept_offsets)
    return _apply(hidden_NH, weight_VH, support, None, temperature, max_rows, vocabulary)[0]


def masked_logprobs_and_kl(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    mu_logprobs: Tensor,
    temperature: float = 1.0,
    max_rows: int = MAX_GATHERED_ROWS,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Tensor, Tensor]:
    """`masked_logprobs`, and KL(mu || pi) on each support from the same gathered logits.

    `mu_logprobs` `[M]` are the rollout's log-probs of the kept ids. The second result, `[N]` nats, carries no gradient:
    KL = sum_{v in S} mu_v (log mu_v - log pi_v). An id with mu = 0 adds nothing; pi = 0 < mu gives +inf. Values that
    rounding made negative become 0; NaN stays NaN. Exact for the truncated policies, not for the full ones.
    """
    support = (target_N, kept_ids, kept_offsets)
    return _apply(hidden_NH, weight_VH, support, mu_logprobs, temperature, max_rows, vocabulary)


@torch.no_grad()
def log_kept_masses(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    kept_ids: Tensor,
    kept_offsets: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """Logs of the full-vocabulary probability of each kept support, and of its least likely ids: `[2, N]`, at most 0.

    log p(S) = lse_S(z / tau) - lse_V(z / tau) is the difference between a full-vocabulary log-prob and a masked one, so
    it is the truncation part of a mismatch. The least likely ids are those within `TIED` of the least likely one:
    samplers may keep several that are tied in few bits.
    """
    full = log_normalizer(hidden_NH, weight_VH, temperature, chunk_tokens, vocabulary)
    if not len(full):
        return full.expand(2, 0)
    weight_VH = vocabulary.real_rows(weight_VH)
    support = Support.of(kept_ids, kept_offsets, vocabulary, len(weight_VH))
    logits = kept_logits(hidden_NH, weight_VH, support, temperature)
    least = -vocabulary.max(torch.segment_reduce(-logits, "max", offsets=support.offsets, initial=float("-inf")))
    tied = logits.masked_fill(logits > least[support.token] + TIED, float("-inf"))
    masses = torch.stack([support.logsumexp(values, vocabulary) for values in (logits, tied)])
    return (masses - full).clamp(max=0.0)


def _kl_terms(mu: Tensor, pi: Tensor) -> Tensor:
    possible = mu > float("-inf")
    gap = torch.where(possible, mu, 0.0) - torch.where(possible, pi, 0.0)
    return torch.where(possible | mu.isnan(), mu.exp() * torch.where(mu.isnan(), mu, gap), 0.0)


def _apply(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    support: tuple[Tensor, Tensor, Tensor],
    mu_logprobs: Tensor | None,
    temperature: float,
    max_rows: int,
    vocabulary: Vocabulary,
) -> tuple[Tensor, Tensor]:
    checked = check_support(hidden_NH.shape[0], *support)
    result: tuple[Tensor, Tensor] = _MaskedLogprobs.apply(  # type: ignore[no-untyped-call, unused-ignore]
        hidden_NH, weight_VH, *support[1:], *checked, mu_logprobs, temperature, max_rows, vocabulary
    )
    return result


class _MaskedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        kept_ids: Tensor,
        kept_offsets: Tensor,
        token: Tensor,
        is_target: Tensor,
        mu_logprobs: Tensor | None,
        temperature: float,
        max_rows: int,
        vocabulary: Vocabulary,
    ) -> tuple[Tensor, Tensor]:
        real_VH = vocabulary.real_rows(weight_VH)
        support = Support.of(kept_ids, kept_offsets, vocabulary, len(real_VH), token)
        logits = kept_logits(hidden_NH, real_VH, support, temperature, max_rows)
        out = logits.new_zeros(hidden_NH.shape[0])
        kl = out.clone()
        is_target = support.take(is_target)
        if len(out):
            logits -= support.logsumexp(logits, vocabulary)[support.token]
            out[support.token[is_target]] = logits[is_target]
            out = vocabulary.sum(out)
            if mu_logprobs is not None:
                terms = _kl_terms(support.take(mu_logprobs).to(logits.dtype), logits)
                kl = vocabulary.sum(support.sum(terms)).clamp_(min=0.0)
        ctx.save_for_backward(hidden_NH, weight_VH, logits, is_target)
        ctx.support, ctx.temperature, ctx.max_rows, ctx.vocabulary = support, temperature, max_rows, vocabulary
        ctx.mark_non_differentiable(kl)
        return out, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, _grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, logprobs, is_target = ctx.saved_tensors
        support, dtype = ctx.support, logprobs.dtype
        real_VH = ctx.vocabulary.real_rows(weight_VH)
        grad_hidden = torch.zeros_like(hidden_NH, dtype=dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VH, dtype=dtype) if ctx.needs_input_grad[1] else None
        grad_logits = grad_N[support.token] * (is_target.to(dtype) - logprobs.exp()) / ctx.temperature
        wide = is_wide(support, real_VH)
        dense_VH = real_VH.to(dtype) if wide else real_VH
        for chunk in chunks(support, real_VH, ctx.max_rows):
            rows, grad = support.rows[chunk.kept], grad_logits[chunk.kept]
            hidden = hidden_NH[chunk.tokens].to(dtype)
            if wide:
                dense = grad.new_zeros(len(hidden), len(real_VH))
                dense[chunk.token, rows] = grad
                if grad_hidden is not None:
                    grad_hidden[chunk.tokens] = dense @ dense_VH
                if grad_weight is not None:
                    grad_weight[: len(real_VH)].addmm_(dense.T, hidden)
                continue
            if grad_hidden is not None:
                terms = real_VH[rows].to(dtype).mul_(grad[:, None])
                grad_hidden[chunk.tokens] = torch.segment_reduce(terms, "sum", offsets=chunk.offsets, initial=0.0)
            if grad_weight is not None:
                grad_weight.index_add_(0, rows, hidden[chunk.token].mul_(grad[:, None]))
        if grad_hidden is not None:
            grad_hidden = ctx.vocabulary.sum(grad_hidden)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            *(None,) * 8,
        )
