"""Sampling masks of a whole batch at once: what SGLang's sampler kept, without work for each request and token.

SGLang packs the kept ids of a batch by two dozen operations over the vocabulary, and appends them to three growing
arrays of each request after every token. Here the kept places of the sampler's own sorted weights are found once, their
ids and log-probs become one string of bytes, and a request keeps its part of it until it is sent. Both are the same bit
for bit. Unusual batches, and all that must end with an error, are SGLang's own.

Shape letters: B requests, V ids in the order of their weights, M kept ids of the batch, S tokens of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

ALONE = "moe_trm_alone"
"""Attribute of a sampler with whether its process serves alone."""
PAIR_BYTES = 8
"""An int32 id and its float32 log-prob."""


class Shared:
    """The kept ids of a batch in the place of SGLang's `SamplingMaskOutput`: the pairs of each request, as bytes."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts

    def map_device_tensors(self, _copy: Callable[[Tensor], Tensor]) -> None:
        """Nothing is left to copy."""


def wrap_building(native: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's `Sampler._build_sampling_mask_output`, which is `native`, for batches whose weights stand in order and
    whose requests all want the support.
    """

    def build(sampler: Any, next_ids_B: Tensor, capture: Any, support_rows: Tensor | None) -> Any:
        weights_BV, ids_BV, selected_B = capture.weights, capture.token_ids, capture.selected_weight
        plain = (
            ids_BV is not None
            and selected_B is not None
            and support_rows is not None
            and support_rows.shape == next_ids_B.shape == selected_B.shape
            and weights_BV.dtype is selected_B.dtype is torch.float32
            and ids_BV.dtype is torch.int32
            and _alone(sampler)
        )
        parts = _parts(weights_BV, ids_BV, selected_B, sampler.sampling_mask_max_tokens) if plain else None
        return native(sampler, next_ids_B, capture, support_rows) if parts is None else Shared(parts)

    return build


def _alone(sampler: Any) -> bool:
    found: bool | None = sampler.__dict__.get(ALONE)
    if found is None:
        found = sampler.__dict__[ALONE] = not dist.is_initialized() or dist.get_world_size() == 1
    return found


def _parts(weights_BV: Tensor, ids_BV: Tensor, selected_B: Tensor, most: int) -> list[bytes] | None:
    """The pairs of each request, as bytes; None where a support is longer than `most`, or holds no sampled id."""
    mass_B, weights = weights_BV.sum(-1).numpy(), weights_BV.numpy()
    # A weight that is no number, none that is positive, or one outside of the support: none of these has a logarithm.
    if not (_positive(selected_B.tolist()) and _positive(mass_B.tolist())):
        return None
    num_requests, width = weights.shape
    flat = weights.ravel()
    places_M = (flat > 0).nonzero()[0]
    ends_B = places_M.searchsorted(np.arange(width, (num_requests + 1) * width, width))
    if most < width and np.diff(ends_B, prepend=0).max() > most:
        return None
    shares_M = flat[places_M] / mass_B[places_M // width]
    pairs = pairs_of(ids_BV.numpy().ravel()[places_M], torch.log(torch.from_numpy(shares_M)).numpy())
    return [pairs[start:end] for start, end in pairwise([0, *(ends_B * PAIR_BYTES).tolist()])]


def _positive(values: list[float]) -> bool:
    """True when all are finite and above 0. Of few numbers Python's own sums are the fastest."""
    return isfinite(sum(values)) and min(values) > 0


def pairs_of(ids_M: np.ndarray, logprobs_M: np.ndarray) -> bytes:
    """Bytes of each int32 id, then those of its float32 log-prob."""
    pairs = np.empty((len(ids_M), 2), np.int32)
    pairs[:, 0], pairs[:, 1] = ids_M, logprobs_M.view(np.int32)
    return pairs.tobytes()


def wrap_sharing(native: Callable[..., None]) -> Callable[..., None]:
    """SGLang's `materialize_sampling_mask_output`, which is `native`: what is shared out already stays so.

    A part stands in the place of both the ids and their log-probs.
    """

    def share(reqs: Sequence[Any], output: Any) -> None:
        packed = None if output is None else output.sampling_mask_output
        if not isinstance(packed, Shared):
            native(reqs, output)
            return
        assert len(packed.parts) == len(reqs), "a batch that changed after it was sampled"
        output.next_token_sampling_mask_idx = output.next_token_sampling_logprobs = packed.parts
        output.next_token_sampling_mask_status = [0] * len(reqs)
        output.sampling_mask_output = None

    return share


def wrap_adding(native: Callable[..., None]) -> Callable[..., None]:
    """SGLang's `add_sampling_mask_return_values`, which is `native`, for parts of a batch."""

    def add(processor: Any, i: int, req: Any, output: Any, *, accept_len: int = 1) -> None:
        part = output.next_token_sampling_mask_idx[i]
        if type(part) is bytes:
            req.sampling_mask_rows.parts.append(part)
        else:
            native(processor, i, req, output, accept_len=accept_len)

    return add


def wrap_places(native: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """SGLang's lists of the rows of a batch that want a mask, or its log-probs: mostly every row, one after the other.

    `native` makes them of a flag for each request, or of two; the last argument is the device.
    """
    every = torch.arange(0)

    def places(*flags: Any) -> Tensor | None:
        nonlocal every
        *wanted, device = flags
        number = len(wanted[0])
        if device != "cpu" or not number or any(flag is None or False in flag for flag in wanted):
            return native(*flags)
        if number > len(every):
            every = torch.arange(2 * number)
        return every[:number]

    return places


class Chunk:
    """The kept ids of S tokens on their way to the answer: SGLang's `SamplingMaskChunk`, without arrays on the way."""

    __slots__ = ("_ends", "_pairs")

    def __init__(self, ends: list[int], pairs: bytes) -> None:
        self._ends, self._pairs = ends, pairs

    def __reduce__(self) -> tuple[type[Chunk], tuple[list[int], bytes]]:
        return Chunk, (self._ends, self._pairs)

    @property
    def lengths(self) -> np.ndarray:
        """`[S]` int32."""
        return np.diff(self._ends, prepend=0).astype(np.int32)

    @property
    def token_ids(self) -> np.ndarray:
        """int32, token after token."""
        return np.ascontiguousarray(_arrays(self._pairs)[0])

    @property
    def logprobs(self) -> np.ndarray:
        """float32, likewise."""
        return np.ascontiguousarray(_arrays(self._pairs)[1])

    def to_lists(self, support_logprobs: bool) -> tuple[list[list[int]], list[list[float]]]:
        """Kept ids and log-probs of each token."""
        assert support_logprobs or not self._ends, "only whole supports are packed"
        ids, logprobs = _arrays(self._pairs)
        return self._rows(ids.tolist()), self._rows(logprobs.tolist())

    def _rows(self, values: list[Any]) -> list[list[Any]]:
        return [values[start:end] for start, end in pairwise([0, *self._ends])]


class Rows:
    """The rows of one request until they are sent: SGLang's `SamplingMaskRows`, which makes no arrays before that.

    `native` is that class: it takes the rows of a request for which SGLang packed any itself.
    """

    native: Callable[[], Any]

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[bytes | tuple[np.ndarray, np.ndarray]] = []

    def append(self, kept: np.ndarray, logprobs: np.ndarray) -> None:
        """Queue the support of one token as SGLang shares it out."""
        self.parts.append((kept, logprobs))

    def view(self) -> Any:
        """The rows so far, which stay."""
        try:
            pairs = b"".join(self.parts)  # type: ignore[arg-type]
        except TypeError:
            return self._native()
        return Chunk([length // PAIR_BYTES for length in accumulate(map(len, self.parts))], pairs)

    def take(self) -> Any:
        """The rows so far; none is left."""
        chunk, self.parts = self.view(), []
        return chunk

    def _native(self) -> Any:
        """All rows in arrays, as soon as SGLang shared out one of them."""
        rows = type(self).native()
        for part in self.parts:
            rows.append(*(_arrays(part) if isinstance(part, bytes) else part))
        return rows.take()


def _arrays(pairs: bytes) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(pairs, np.int32)[::2], np.frombuffer(pairs, np.float32)[1::2]
