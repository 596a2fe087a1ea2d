"""Routes of a finished request, gathered and sent in few calls.

SGLang sends them from process to process as a tensor. Torch pickles a tensor as a file within the message, which takes
ten times as long as the few hundred bytes of a short answer. Here the bytes travel, and a plain tensor arrives.

Shape letters: R rows of the request, D decoder layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Rows(Tensor):
    """Routes `[R, D, K]` of one request. Unpickled, they are a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        ids_RDK = self.numpy()
        return _arrived, (ids_RDK.tobytes(), ids_RDK.dtype.str, ids_RDK.shape)


def _arrived(raw: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.ndarray(shape, dtype, bytearray(raw)))


def wrap_gathering(native: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SGLang's `get_topk` of its recorder of routes, which is `native`: the same rows, from memory of a CPU."""

    def get_topk(capturer: Any, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0) -> Tensor:
        if start_len < 0:
            return native(capturer, req_pool_idx, seqlen, req_to_token_pool, start_len)
        first = min(start_len, seqlen - 1)
        places_R = req_to_token_pool.req_to_token.numpy()[req_pool_idx, first : seqlen - 1]
        return torch.from_numpy(capturer.host_cache.buffer.numpy()[places_R]).as_subclass(Rows)

    return get_topk
