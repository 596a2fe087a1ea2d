"""Attention of all requests of a pass at once on SGLang's `torch_native` backend.

SGLang's own loops over the requests in Python, which takes most of a pass of many short ones. Imported by SGLang's
scheduler only.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from moe_trm_sglang_cpu.decoding import Together, decode, plan
from moe_trm_sglang_cpu.prefill import Prefill, prefill
from moe_trm_sglang_cpu.prefill import plan as plan_prefill


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """`torch_native` with all requests at once in plain causal layers. All other layers and passes are SGLang's own."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._decodes: list[Together] = []
        self._prefills: list[Prefill] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the pass, for every layer."""
        super().init_forward_metadata(forward_batch)
        self._decodes, self._prefills = [], []
        if self.use_sliding_window_kv_pool:
            return
        table, rows = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices
        if forward_batch.forward_mode.is_decode():
            self._decodes = plan(table, rows, forward_batch.seq_lens)
        elif forward_batch.forward_mode.name in ("EXTEND", "MIXED"):
            self._prefills = plan_prefill(table, rows, forward_batch.seq_lens, forward_batch.extend_seq_lens)

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, keys: Tensor, values: Tensor, *requests: Any, **options: Any
    ) -> Tensor:
        """SGLang's loop, given the cache of one layer: `[B, H, D]` into `output`."""
        if not self._decodes or _is_special(requests, options):
            return super()._run_sdpa_forward_decode(query, output, keys, values, *requests, **options)  # type: ignore[no-any-return]
        return output.copy_(decode(query, keys, values, self._decodes, options["scaling"]))

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, keys: Tensor, values: Tensor, *requests: Any, **options: Any
    ) -> Tensor:
        """SGLang's loop, given the cache of one layer: `[N, H, D]` into `output`."""
        if not (self._prefills and options["causal"]) or _is_special(requests, options):
            return super()._run_sdpa_forward_extend(query, output, keys, values, *requests, **options)  # type: ignore[no-any-return]
        return output.copy_(prefill(query, keys, values, self._prefills, options["scaling"]))


def _is_special(requests: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """True for a layer that attends to an encoder or within a window."""
    *_, encoder_lengths = requests
    return encoder_lengths is not None or options["is_cross_attn"] or options["sliding_window_size"] is not None
