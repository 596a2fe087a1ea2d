"""Sampling masks of a whole batch at once: what SGLang's sampler kept, without work for each request and token.

SGLang packs the kept ids of a batch by two dozen operations over the vocabulary, and appends them to three growing
arrays of each request after every token. Here the sampler's own sorted weights are cut after the longest support, ids
and log-probs of the batch become one string of bytes, and a request keeps its part of it until it is sent. Both are the
same bit for bit. Unusual batches, and all that must end with an error, are SGLang's own.

Shape letters: B requests, V ids in the order of their weights, M kept ids of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

ALONE = "moe_trm_alone"
"""Attribute of a sampler with whether no other rank samples the same tokens."""
PAIR_BYTES = 8
"""An int32 id and its float32 log-prob."""


def wrap_building(native: Callable[..., Any], output: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's `Sampler._build_sampling_mask_output`, which is `native`, for batches whose weights stand in order.

    `output`: SGLang's `SamplingMaskOutput`.
    """

    def build(sampler: Any, next_ids_B: Tensor, capture: Any, support_rows: Tensor | None) -> Any:
        weights_BV, ids_BV, selected_B = capture.weights, capture.token_ids, capture.selected_weight
        plain = (
            ids_BV is not None
            and selected_B is not None
            and support_rows is not None
            and len(support_rows) == len(weights_BV)
            and weights_BV.dtype == selected_B.dtype == torch.float32
            and weights_BV.device.type == "cpu"
            and _alone(sampler)
        )
        if plain:
            lengths_B = (weights_BV > 0).sum(-1, dtype=torch.int32)
            mass_B = weights_BV.sum(-1)
            logprobs_B, longest = torch.log(selected_B / mass_B), int(lengths_B.max())
            # A weight that is no number, none that is positive, or one outside of the support: none of it is finite.
            if longest <= sampler.sampling_mask_max_tokens and bool(torch.isfinite(logprobs_B).all()):
                return output(
                    token_ids=ids_BV[:, :longest],
                    lengths=lengths_B,
                    selected_logprobs=logprobs_B,
                    support_logprobs=torch.log(weights_BV[:, :longest] / mass_B[:, None]),
                    statuses=torch.zeros_like(lengths_B),
                )
        return native(sampler, next_ids_B, capture, support_rows)

    return build


def _alone(sampler: Any) -> bool:
    found: bool | None = sampler.__dict__.get(ALONE)
    if found is None:
        groups = [group for group in (sampler.tp_sync_group, sampler.cp_sync_group) if group is not None]
        found = not dist.is_initialized() or all(dist.get_world_size(group) == 1 for group in groups)
        sampler.__dict__[ALONE] = found
    return found


def wrap_sharing(native: Callable[..., None]) -> Callable[..., None]:
    """SGLang's `materialize_sampling_mask_output`, which is `native`, where every request of the batch wants support.

    Each gets its part of the batch's M pairs of a kept id and its log-prob, as bytes, in the place of both.
    """

    def share(reqs: Sequence[Any], output: Any) -> None:
        packed = None if output is None else output.sampling_mask_output
        if packed is None:
            return
        support = packed.support_logprobs
        if (
            packed.num_accept_tokens is not None
            or support is None
            or len(support) != len(reqs)
            or bool(packed.statuses.any())
        ):
            native(reqs, output)
            return
        lengths_B = packed.lengths.numpy()
        kept = np.arange(support.shape[1]) < lengths_B[:, None]
        pairs_M = _pairs(packed.token_ids.numpy(), support.numpy())[kept].tobytes()
        ends = (np.cumsum(lengths_B, dtype=np.int64) * PAIR_BYTES).tolist()
        parts = [pairs_M[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        output.next_token_sampling_mask_idx = output.next_token_sampling_logprobs = parts
        output.next_token_sampling_mask_status = [0] * len(reqs)
        output.sampling_mask_output = None

    return share


def _pairs(ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """int64 of the same shape: bytes of an int32 id, then those of its float32 log-prob."""
    pairs = np.empty((*ids.shape, 2), np.int32)
    pairs[..., 0], pairs[..., 1] = ids, logprobs.view(np.int32)
    return pairs.view(np.int64)[..., 0]


class Rows:
    """The rows of one request until they are sent: SGLang's `SamplingMaskRows`, which makes no arrays before that.

    `chunk` makes SGLang's `SamplingMaskChunk`.
    """

    chunk: Callable[..., Any]

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def append(self, kept: bytes | np.ndarray, logprobs: bytes | np.ndarray) -> None:
        """Queue the support of one token: its pairs, or the ids and log-probs of a batch that SGLang shared out."""
        if isinstance(kept, np.ndarray):
            kept = _pairs(kept, np.asarray(logprobs)).tobytes()
        self._parts.append(kept)

    def view(self) -> Any:
        """The rows so far, which stay."""
        pairs = np.frombuffer(b"".join(self._parts), np.int32).reshape(-1, 2)
        return type(self).chunk(
            lengths=np.array([len(part) for part in self._parts], np.int32) // PAIR_BYTES,
            token_ids=np.ascontiguousarray(pairs[:, 0]),
            logprobs=np.ascontiguousarray(pairs[:, 1]).view(np.float32),
        )

    def take(self) -> Any:
        """The rows so far; none is left."""
        chunk, self._parts = self.view(), []
        return chunk
