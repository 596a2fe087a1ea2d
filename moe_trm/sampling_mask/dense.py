"""Log-probs over the whole vocabulary, computed in tiles, without ever holding `[N, V]` logits.

Shape letters: N tokens, H hidden size, V vocabulary (rows held here), C tokens and W ids of a tile.

Logits exist for one tile of tokens and ids at a time. All tiles share one buffer that fits a processor's cache.
Log-sum-exps are carried from tile to tile. Tiles are recomputed in the backward pass. There the outer loop is over ids,
so each row of the weight is read, and its gradient written, once. Everything is float32 (float64 for float64 inputs).
The same code runs on CUDA, where every step is a library kernel.
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

TILE_LOGITS = {"cpu": 2**21, "cuda": 2**27}
"""Logits that live at once: 8 MiB of float32 where a cache holds them, 512 MiB where large products matter more."""

CHUNK_TOKENS = 4096
"""Tokens of a tile at most."""


@dataclass(frozen=True)
class FullScores:
    """Values of each token from one pass over the vocabulary; values not asked for are None.

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
        chunk_tokens: tokens of a tile; None: up to `CHUNK_TOKENS`.
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
    """`full_logprobs`, and in the same pass the entropy, the sum of squared probabilities and the `top_k` ids.

    These are the likeliest ids.
    """
    request = _Requested(temperature, chunk_tokens, vocabulary, entropy, sum_of_squares, top_k)
    logprobs, entropies, squares, top_ids, top_logprobs = _FullScores.apply(  # type: ignore[no-untyped-call, unused-ignore]
        hidden_NH, weight_VH, target_N, request
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
    request = _Requested(temperature, chunk_tokens, vocabulary, entropy=False, sum_of_squares=False, top_k=0)
    tiles = _Tiles(hidden_NH, vocabulary.real_rows(weight_VH), request)
    out = hidden_NH.new_empty(hidden_NH.shape[0], dtype=tiles.dtype)
    for chunk in tiles.chunks():
        sums = _Sums(request, chunk.stop - chunk.start, out)
        for _, logits_CW in tiles.logits(chunk):
            sums.add(logits_CW)
        out[chunk] = sums.over_ranges().log_norm
    return out


@dataclass(frozen=True)
class _Requested:
    temperature: float
    chunk_tokens: int | None
    vocabulary: Vocabulary
    entropy: bool
    sum_of_squares: bool
    top_k: int


class _Tiles:
    """Tiles of tokens and ids, with their logits / tau in one buffer, which the caller may write to."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, request: _Requested) -> None:
        self.dtype = compute_dtype(hidden_NH)
        self._hidden, self._weight, self._temperature = hidden_NH, weight_VH, request.temperature
        self._tokens = max(1, min(request.chunk_tokens or CHUNK_TOKENS, len(hidden_NH)))
        self._ids = max(1, min(TILE_LOGITS.get(hidden_NH.device.type, 2**24) // self._tokens, len(weight_VH)))
        self._buffer = hidden_NH.new_empty(self._tokens * self._ids, dtype=self.dtype)

    def chunks(self) -> Iterator[slice]:
        for start in range(0, len(self._hidden), self._tokens):
            yield slice(start, min(start + self._tokens, len(self._hidden)))

    def hidden(self, chunk: slice) -> Tensor:
        return self._hidden[chunk].to(self.dtype)

    def weights(self) -> Iterator[tuple[slice, Tensor]]:
        """Ranges of ids and their rows."""
        for start in range(0, len(self._weight), self._ids):
            ids = slice(start, min(start + self._ids, len(self._weight)))
            yield ids, self._weight[ids].to(self.dtype)

    def product(self, hidden_CH: Tensor, weight_WH: Tensor) -> Tensor:
        shape = len(hidden_CH), len(weight_WH)
        logits = torch.mm(hidden_CH, weight_WH.T, out=self._buffer[: shape[0] * shape[1]].view(shape))
        return logits if self._temperature == 1.0 else logits.div_(self._temperature)

    def logits(self, chunk: slice) -> Iterator[tuple[slice, Tensor]]:
        hidden = self.hidden(chunk)
        for ids, weight in self.weights():
            yield ids, self.product(hidden, weight)


class _Sums:
    """State carried from tile to tile.

    It has the largest logit, and sums over ids of e = exp(z - largest), of e (z - largest) and of e^2.
    """

    def __init__(self, request: _Requested, num_tokens: int, like: Tensor) -> None:
        self._requested = request
        self._top = like.new_full((num_tokens,), float("-inf"))
        self._sum, self._product, self._square = (like.new_zeros(num_tokens) for _ in range(3))

    def add(self, logits_CW: Tensor) -> None:
        """Take in a tile, which is overwritten."""
        request, top_C = self._requested, logits_CW.amax(dim=1).maximum(self._top)
        self._rescale(top_C)
        logits_CW.sub_(top_C[:, None])
        powers_CW = logits_CW.exp() if request.entropy else logits_CW.exp_()
        self._sum += powers_CW.sum(dim=1)
        if request.entropy:
            # exp(-inf) * -inf would be NaN: an id of probability zero adds nothing.
            self._product += torch.linalg.vecdot(powers_CW, logits_CW.nan_to_num_(neginf=0.0))
        if request.sum_of_squares:
            self._square += torch.linalg.vecdot(powers_CW, powers_CW)

    def over_ranges(self) -> _Sums:
        """The sums over all ranges of the vocabulary."""
        ranges = self._requested.vocabulary
        self._rescale(ranges.max(self._top.clone()))
        self._sum, self._product, self._square = (ranges.sum(x) for x in (self._sum, self._product, self._square))
        return self

    @property
    def log_norm(self) -> Tensor:
        return self._top + self._sum.log()

    @property
    def entropy(self) -> Tensor:
        return self._sum.log() - self._product / self._sum

    @property
    def sum_of_squares(self) -> Tensor:
        return self._square / self._sum.square()

    def _rescale(self, top_C: Tensor) -> None:
        shift = (self._top - top_C).nan_to_num_(neginf=-1e4)
        factor = shift.exp()
        self._product = (self._product + self._sum * shift) * factor
        self._sum, self._square, self._top = self._sum * factor, self._square * factor.square(), top_C


def _targets_in(target_C: Tensor, ids: slice, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Tokens of the chunk whose target is among `ids` of this range, and its column."""
    columns = target_C - (vocabulary.first + ids.start)
    tokens = ((columns >= 0) & (columns < ids.stop - ids.start)).nonzero()[:, 0]
    return tokens, columns[tokens]


class _FullScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, request: _Requested
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        n, ranges = hidden_NH.shape[0], request.vocabulary
        tiles = _Tiles(hidden_NH, ranges.real_rows(weight_VH), request)
        logprobs, log_norm, entropies, squares = (hidden_NH.new_zeros(n, dtype=tiles.dtype) for _ in range(4))
        top_ids = target_N.new_zeros(n, request.top_k)
        top_logprobs = logprobs.new_zeros(n, request.top_k)
        for chunk in tiles.chunks():
            sums = _Sums(request, chunk.stop - chunk.start, logprobs)
            best: list[tuple[Tensor, Tensor]] = []
            for ids, logits_CW in tiles.logits(chunk):
                tokens, columns = _targets_in(target_N[chunk], ids, ranges)
                logprobs[chunk.start + tokens] = logits_CW[tokens, columns]
                if request.top_k:
                    best = [_best([*best, _top(logits_CW, request.top_k, ranges.first + ids.start)], request.top_k)]
                sums.add(logits_CW)
            sums.over_ranges()
            log_norm[chunk], entropies[chunk], squares[chunk] = sums.log_norm, sums.entropy, sums.sum_of_squares
            if request.top_k:
                values, kept = (ranges.gather(part) for part in best[0])
                top_logprobs[chunk], top_ids[chunk] = _best([(values, kept)], request.top_k)
        logprobs = ranges.sum(logprobs) - log_norm
        top_logprobs -= log_norm[:, None]
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, log_norm, entropies)
        ctx.requested = request
        ctx.mark_non_differentiable(squares, top_ids, top_logprobs)
        return logprobs, entropies, squares, top_ids, top_logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, grad_entropy_N: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, target_N, log_norm, entropies = ctx.saved_tensors
        request: _Requested = ctx.requested
        tiles = _Tiles(hidden_NH, request.vocabulary.real_rows(weight_VH), request)
        grad_hidden = torch.zeros_like(hidden_NH, dtype=tiles.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VH, dtype=tiles.dtype) if ctx.needs_input_grad[1] else None
        scaled_N = grad_N / request.temperature
        for ids, weight_WH in tiles.weights():
            for chunk in tiles.chunks():
                hidden_CH = tiles.hidden(chunk)
                logits_CW = tiles.product(hidden_CH, weight_WH).sub_(log_norm[chunk, None])
                factor = -scaled_N[chunk, None]
                if request.entropy:
                    # d entropy / d z_j = -p_j (log p_j + entropy) / tau
                    slope = grad_entropy_N[chunk, None] / request.temperature
                    factor = factor - slope * (logits_CW.nan_to_num(neginf=0.0) + entropies[chunk, None])
                grad_CW = logits_CW.exp_().mul_(factor)
                tokens, columns = _targets_in(target_N[chunk], ids, request.vocabulary)
                grad_CW[tokens, columns] += scaled_N[chunk][tokens]
                if grad_hidden is not None:
                    grad_hidden[chunk].addmm_(grad_CW, weight_WH)
                if grad_weight is not None:
                    grad_weight[ids].addmm_(grad_CW.T, hidden_CH)
        if grad_hidden is not None:
            grad_hidden = request.vocabulary.sum(grad_hidden)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            None,
            None,
        )


def _top(logits_CW: Tensor, k: int, first: int) -> tuple[Tensor, Tensor]:
    values, columns = logits_CW.topk(min(k, logits_CW.shape[1]), dim=1)
    return values, columns + first


def _best(parts: list[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest values of all parts and their ids, fewer where there are fewer."""
    values, ids = (torch.cat(columns, dim=1) for columns in zip(*parts, strict=True))
    values, places = values.topk(min(k, values.shape[1]), dim=1)
    return values, ids.gather(1, places)
