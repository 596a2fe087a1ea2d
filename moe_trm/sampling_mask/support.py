"""Logits of kept ids only.

Shape letters: N sampled tokens, H hidden size, V vocabulary (rows held here), M kept ids in all (held here).

A kept support is compressed sparse rows: token `n` keeps `ids[offsets[n]:offsets[n + 1]]`. Rows of the output weight
are gathered in chunks. Where supports are so wide that a matrix product is cheaper, the kept logits are picked from one
product per chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trm.errors import RecordRejected
from moe_trm.sampling_mask.vocabulary import Vocabulary

MAX_GATHERED_ROWS = 16384

WIDE = 128
"""Share limit: a matrix product is cheaper when more than `1 / WIDE` of the vocabulary is kept on average.

Measured on one CPU core at V = 151,936, H = 1,024, forward pass: a gathered id takes 7 us, a whole row of logits 4.4
ms.
"""


def compute_dtype(values: Tensor) -> torch.dtype:
    """float32, or float64 for float64 values."""
    return torch.promote_types(values.dtype, torch.float32)


@dataclass(frozen=True)
class Support:
    """The kept ids that this rank holds.

    Attributes:
        rows: `[M]` rows of the weight.
        offsets: `[N + 1]`.
        token: `[M]` the token each kept id belongs to.
        held: `[M]` positions in the whole support, or None when all of it is held.
    """

    rows: Tensor
    offsets: Tensor
    token: Tensor
    held: Tensor | None

    @classmethod
    def of(
        cls, ids: Tensor, offsets: Tensor, vocabulary: Vocabulary, num_rows: int, token: Tensor | None = None
    ) -> Support:
        """The part of the support `ids`, `offsets` whose ids are rows `0..num_rows - 1` here.

        `token`: `tokens_of` the whole support, where that is known.
        """
        token = tokens_of(ids, offsets) if token is None else token
        if vocabulary.group is None:
            return cls(ids - vocabulary.first if vocabulary.first else ids, offsets, token, None)
        rows = ids - vocabulary.first
        held = ((rows >= 0) & (rows < num_rows)).nonzero()[:, 0]
        sizes = torch.zeros_like(offsets).index_add_(0, token[held] + 1, torch.ones_like(held))
        return cls(rows[held], sizes.cumsum(0), token[held], held)

    def take(self, per_kept_id: Tensor) -> Tensor:
        """The values of the held ids."""
        return per_kept_id if self.held is None else per_kept_id[self.held]

    def sum(self, per_held_id: Tensor) -> Tensor:
        """`[N]` sums over the held ids of each token, each added separately and in order.

        The bits do not depend on the other tokens.
        """
        return torch.segment_reduce(per_held_id, "sum", offsets=self.offsets, initial=0.0)

    def logsumexp(self, logits: Tensor, vocabulary: Vocabulary) -> Tensor:
        """`[N]` log-sum-exp of `[M]` logits over each token's whole support."""
        top = vocabulary.max(torch.segment_reduce(logits, "max", offsets=self.offsets, initial=float("-inf")))
        return top + vocabulary.sum(self.sum((logits - top[self.token]).exp())).log()


@dataclass(frozen=True)
class SupportChunk:
    """Tokens `tokens` and the held ids `kept` that are theirs; `token` counts from the chunk's first token."""

    tokens: slice
    kept: slice
    offsets: Tensor
    token: Tensor


def chunks(support: Support, weight_VH: Tensor, max_rows: int) -> Iterator[SupportChunk]:
    """Runs of tokens whose gathered rows, or dense logits, fit into `max_rows * H` numbers."""
    bounds = support.offsets.cpu()
    num_tokens = len(bounds) - 1
    wide_tokens = max(1, max_rows * weight_VH.shape[1] // max(1, len(weight_VH)))
    wide, start = is_wide(support, weight_VH), 0
    while start < num_tokens:
        first = int(bounds[start])
        fitting = int(torch.searchsorted(bounds, first + max_rows, right=True)) - 1
        stop = min(start + wide_tokens if wide else max(fitting, start + 1), num_tokens)
        last = int(bounds[stop])
        offsets = support.offsets[start : stop + 1] - first
        yield SupportChunk(slice(start, stop), slice(first, last), offsets, support.token[first:last] - start)
        start = stop


def is_wide(support: Support, weight_VH: Tensor) -> bool:
    """True when one matrix product per chunk is cheaper than gathering rows."""
    return WIDE * len(support.rows) > (len(support.offsets) - 1) * len(weight_VH)


def kept_logits(
    hidden_NH: Tensor, weight_VH: Tensor, support: Support, temperature: float, max_rows: int = MAX_GATHERED_ROWS
) -> Tensor:
    """`[M]` logits of the held ids, divided by the temperature."""
    dtype = compute_dtype(hidden_NH)
    logits = hidden_NH.new_empty(len(support.rows), dtype=dtype)
    wide = is_wide(support, weight_VH)
    dense_VH = weight_VH.to(dtype) if wide else weight_VH
    for chunk in chunks(support, weight_VH, max_rows):
        hidden, rows = hidden_NH[chunk.tokens].to(dtype), support.rows[chunk.kept]
        if wide:
            logits[chunk.kept] = (hidden @ dense_VH.T)[chunk.token, rows]
        else:
            logits[chunk.kept] = torch.linalg.vecdot(weight_VH[rows].to(dtype), hidden[chunk.token])
    return logits.div_(temperature)


def tokens_of(ids: Tensor, offsets: Tensor) -> Tensor:
    """`[M]` the token that each kept id belongs to."""
    return torch.repeat_interleave(offsets.diff(), output_size=len(ids))


def check_support(num_tokens: int, target_N: Tensor, kept_ids: Tensor, kept_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """`tokens_of` the support, and `[M]` bool: the ids that are their token's target.

    Raises `RecordRejected` unless each target is exactly once in its own support.
    """
    where = "masked_logprobs"
    fits = len(kept_offsets) == num_tokens + 1 and len(target_N) == num_tokens
    if not fits or int(kept_offsets[0]) != 0 or int(kept_offsets[-1]) != len(kept_ids):
        got = f"{len(kept_offsets)} offsets, {len(target_N)} targets, {len(kept_ids)} ids"
        expected = f"{num_tokens + 1} offsets from 0 to the number of ids, {num_tokens} targets"
        raise RecordRejected(
            "mask_shape", "sampling mask does not fit the tokens", where=where, got=got, expected=expected
        )
    token = tokens_of(kept_ids, kept_offsets)
    is_target = kept_ids == target_N[token]
    hits = torch.zeros_like(target_N).index_add_(0, token, is_target.to(target_N.dtype))
    wrong = (hits != 1).nonzero()
    if len(wrong):
        position = int(wrong[0])
        raise RecordRejected(
            "mask_violation",
            "the sampled token is not exactly once in its own sampling mask",
            where=f"{where}, token {position}",
            got=f"{int(hits[position])} times among {int(kept_offsets.diff()[position])} kept ids",
            expected="once",
            fix="reject the record where it is parsed (SamplingMask.validate)",
        )
    return token, is_target
