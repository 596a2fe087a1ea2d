"""Routes of a pass and of a finished request, kept, gathered and sent in few calls.

SGLang copies the choice of each layer into one buffer, and after the pass all of them into another one. Here they wait
for the end of the pass, and are copied once.

SGLang sends routes from process to process as a tensor. Torch pickles a tensor as a file within the message, which
takes ten times as long as the few hundred bytes of a short answer. Here an array waits for the answer, and the bytes
travel.

Shape letters: N tokens of a pass, R rows of the request, D decoder layers, K experts per token, C = D * K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHOSEN = "moe_trm_chosen"
"""Attribute of SGLang's recorder of routes with the choices of a pass, until its end."""


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


def forget(capturer: Any) -> None:
    """Drop the choices of a pass that did not come to its end. `capturer`: SGLang's recorder of routes, or None."""
    if capturer is not None:
        capturer.__dict__.pop(CHOSEN, None)


def begin(capturer: Any) -> list[Tensor] | None:
    """Takes the chosen experts `[N, K]` of each layer of the next pass, in their order; None without a recorder."""
    if capturer is None:
        return None
    chosen: list[Tensor] = []
    capturer.__dict__[CHOSEN] = chosen
    return chosen


def wrap_end(native: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's `on_forward_end` of its recorder, which is `native`: the choices that wait are kept with one copy.

    Where they are not those of all layers and tokens, or SGLang copies later, it is told of them layer by layer.
    """
    routes = _View()

    def on_forward_end(
        capturer: Any, forward_batch: Any, can_run_graph: bool, cuda_graph_batch: Any, no_copy_to_cpu: bool = False
    ) -> Any:
        chosen: list[Tensor] | None = capturer.__dict__.pop(CHOSEN, None)
        if chosen:
            slots, kept = forward_batch.out_cache_loc_virtual, routes.of(capturer.host_cache.buffer)
            slots_N = (forward_batch.out_cache_loc if slots is None else slots).numpy()
            ids_NC, (_, layers, top_k) = torch.cat(chosen, 1).numpy(), kept.shape
            if ids_NC.shape == (len(slots_N), layers * top_k) and not no_copy_to_cpu:
                kept[slots_N] = ids_NC.reshape(-1, layers, top_k)
                return None
            for number, ids_NK in enumerate(chosen):
                capturer.capture(number, ids_NK)
        return native(capturer, forward_batch, can_run_graph, cuda_graph_batch, no_copy_to_cpu)

    return on_forward_end


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
