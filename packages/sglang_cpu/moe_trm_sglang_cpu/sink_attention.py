"""Attention with sinks (gpt-oss) in torch: the computation of SGLang's `triton` backend for machines without triton.

Imported by SGLang's scheduler only.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from moe_trm_sglang_cpu.attention import attention


class SinkAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """`torch_native` with a logit per head that takes part in the softmax and has no value.

    Needs one pool for all layers' keys and values.
    """

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, sinks: Any = None
    ) -> Tensor:
        """Prefill: `extend_seq_lens` queries of each request, whose prefix is cached. `[tokens, H * D]` in and out."""
        return self._attend(q, k, v, layer, batch, batch.extend_seq_lens, save_kv_cache, sinks)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, sinks: Any = None
    ) -> Tensor:
        """Decoding: one query of each request."""
        return self._attend(q, k, v, layer, batch, torch.ones_like(batch.seq_lens), save_kv_cache, sinks)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, num_queries: Tensor, save: bool, sinks: Any
    ) -> Tensor:
        if save:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        queries = torch.split(q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), num_queries.tolist())
        requests = zip(queries, batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
        return torch.cat(
            [
                attention(query, keys[slots], values[slots], layer.scaling, window, sinks)
                for query, row, length in requests
                for slots in [self.req_to_token_pool.req_to_token[row, :length]]
            ]
        ).flatten(1)
