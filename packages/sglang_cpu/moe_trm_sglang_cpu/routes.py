"""Routes of a finished request, gathered and sent in few calls.

SGLang sends them from process to process as a tensor. Torch pickles a tensor as a file within the message, which takes
ten times as long as the few hundred bytes of a short answer. Here an array waits for the answer, and the bytes travel.

Shape letters: R rows of the request, D decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Rows:
    """Routes `[R, D, K]` of one request, with what SGLang asks of its tensor. Unpickled, they are a plain tensor."""

    __slots__ = ("_ids_RDK", "shape")

    def __init__(self, ids_RDK: np.ndarray) -> None:
        self._ids_RDK, self.shape = ids_RDK, ids_RDK.shape

    def numpy(self) -> np.ndarray:
        """As of a tensor."""
        return self._ids_RDK

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._ids_RDK.tobytes(), self._ids_RDK.dtype.str, self.shape)


def _arrived(raw: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.ndarray(shape, dtype, bytearray(raw)))


class _View:
    """The array of the tensor that was given last: SGLang keeps its buffers as long as it runs."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._array = np.empty(0)

    def of(self, tensor: Tensor) -> np.ndarray:
        if tensor is not self._tensor:
            self._tensor, self._array = tensor, tensor.numpy()
        return self._array


def wrap_gathering(native: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's `get_topk` of its recorder of routes, which is `native`: the same rows, from memory of a CPU."""
    places, routes = _View(), _View()

    def get_topk(capturer: Any, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> Any:
        if start_len < 0:
            return native(capturer, req_pool_idx, seqlen, req_to_token_pool, start_len)
        first = min(start_len, seqlen - 1)
        places_R = places.of(req_to_token_pool.req_to_token)[req_pool_idx, first : seqlen - 1]
        return Rows(routes.of(capturer.host_cache.buffer).take(places_R, 0))

    return get_topk
