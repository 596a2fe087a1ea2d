"""Decoding of all requests of a pass at once on SGLang's `torch_native` backend.

SGLang's own loops over the requests in Python, which takes most of a pass of many short ones. Imported by SGLang's
scheduler only.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from moe_trm_sglang_cpu.decoding import Together, decode, plan


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """`torch_native` with all requests at once in plain causal layers. All other layers and passes are SGLang's own."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._lots: list[Together] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the pass, for every layer."""
        super().init_forward_metadata(forward_batch)
        plain = forward_batch.forward_mode.is_decode() and not self.use_sliding_window_kv_pool
        requests = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens
        self._lots = plan(*requests) if plain else []

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, keys: Tensor, values: Tensor, *requests: Any, **options: Any
    ) -> Tensor:
        """SGLang's loop, given the cache of one layer: one query of each request, `[B, H, D]` into `output`."""
        *_, encoder_lengths = requests
        special = encoder_lengths is not None or options["is_cross_attn"] or options["sliding_window_size"] is not None
        if special or not self._lots:
            return super()._run_sdpa_forward_decode(query, output, keys, values, *requests, **options)  # type: ignore[no-any-return]
        return output.copy_(decode(query, keys, values, self._lots, options["scaling"]))
