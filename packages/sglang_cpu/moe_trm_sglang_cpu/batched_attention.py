"""Batched decoding and prefill on SGLang's `torch_native` backend.

SGLang's own loops over the requests in Python, which takes most of a step of many short ones. Imported by SGLang's
scheduler only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from torch import Tensor

from moe_trm_sglang_cpu.decoding import Together, decode, plan
from moe_trm_sglang_cpu.dense_rows import DenseRows, Step
from moe_trm_sglang_cpu.prefill import Prefill, prefill
from moe_trm_sglang_cpu.prefill import plan as plan_prefill


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """`torch_native` with all requests at once in plain causal layers. All other layers and passes are SGLang's own."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._pass: Any = None
        self._lots: list[Together] = []
        self._prefills: list[Prefill] = []
        self._step: Step | None = None
        self._rows: DenseRows | None = None
        pool = self.token_to_kv_pool
        if type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and pool.store_dtype == runner.dtype:
            dims = pool.head_dim, pool.v_head_dim
            table = self.req_to_token_pool.req_to_token
            self._rows = DenseRows(table, pool.layer_num, pool.head_num, dims, pool.dtype)

    def forget(self) -> None:
        """Drop what is kept of requests beside the cache."""
        if self._rows is not None:
            self._rows.forget()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the pass, for every layer."""
        super().init_forward_metadata(forward_batch)
        self._pass, self._lots, self._prefills, self._step = None, [], [], None
        table, rows, lengths = (
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
        )
        if forward_batch.forward_mode.is_decode() and not self.use_sliding_window_kv_pool:
            self._pass = table, rows, lengths
            self._step = self._rows.step(rows, lengths) if self._rows is not None else None
        elif self._rows is not None:
            self._rows.changed(rows)
        if forward_batch.forward_mode.name in ("EXTEND", "MIXED") and not self.use_sliding_window_kv_pool:
            self._prefills = plan_prefill(table, rows, lengths, forward_batch.extend_seq_lens)

    @property
    def is_planned(self) -> bool:
        """True if `attend_of` computes the plain causal layers of this pass."""
        return self._pass is not None or bool(self._prefills)

    def attend_of(self, forward_batch: Any) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
        """Attention of a plain causal layer in this pass, which keeps keys and values first.

        It takes SGLang's module of the layer, queries `[N, H, D]`, and keys and values `[N, G, D]`; `[N, H * D]` out.
        """
        pool, slots = self.token_to_kv_pool, forward_batch.out_cache_loc
        places = KVWriteLoc(slots, self.swa_out_cache_loc)
        # What SGLang's `set_kv_buffer` does for such a pool, after a dozen questions.
        plain = self._rows is not None and not (
            pool.use_hnd
            or pool.is_quantized_kv_cache
            or pool.layer_transfer_counter
            or pool.requires_physical_write_loc
        )

        def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if plain:
                number = layer.layer_id - pool.start_layer
                cache = pool.k_buffer[number], pool.v_buffer[number]
                cache[0].index_copy_(0, slots, key)
                cache[1].index_copy_(0, slots, value)
            else:
                pool.set_kv_buffer(layer, places, key, value)
                cache = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            if self._step is not None and self._rows is not None:
                return self._rows.attend(self._step, layer.layer_id, (query, key, value), cache, layer.scaling)
            if self._pass is not None:
                return self._decode(query, *cache, layer.scaling)
            return prefill(query, *cache, self._prefills, layer.scaling).flatten(1)

        return attend

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention to gathered keys and values. The lots are those of every layer."""
        self._lots = self._lots or plan(*self._pass)
        return decode(query, keys, values, self._lots, scaling).flatten(1)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """One query of each request, `[B, H * D]` in and out."""
        window = layer.sliding_window_size
        plain = k is not None and forward_batch.encoder_lens is None and (window is None or window < 0)
        if self._pass is None or not plain or layer.is_cross_attention:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)  # type: ignore[no-any-return]
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        pool = self.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        cache = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        return self._decode(query, *cache, layer.scaling)

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: Any = None,
        **options: Any,
    ) -> Tensor:
        is_plain = encoder_lens is None and options.get("causal") and options.get("sliding_window_size") is None
        if not (self._prefills and is_plain):
            rows = (req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens)
            common = (query, output, k_cache, v_cache)
            found: Tensor = super()._run_sdpa_forward_extend(*common, *rows, scaling, **options)
            return found
        return output.copy_(prefill(query, k_cache, v_cache, self._prefills, scaling))
