"""SGLang plugin `moe_trm_sglang_cpu_kernels`: attention in decoding, and experts, in few calls of torch.

`SGLANG_PLUGINS=moe_trm_sglang_cpu` in the server's environment, which is SGLang's own list of plugins, leaves it out.
With `MOE_TRM_EXACT=1` there, `exact.py` takes their place.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from moe_trm_sglang_cpu.plugin import without_cuda


def activate() -> None:
    """Register both, in SGLang's own registries."""
    if not without_cuda():
        return
    if os.environ.get("MOE_TRM_EXACT") == "1":
        from moe_trm_sglang_cpu import exact

        exact.activate()
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from moe_trm_sglang_cpu.experts import around

    register_attention_backend("torch_native")(_batched_attention)
    HookRegistry.register("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", around, HookType.AROUND)


def _batched_attention(runner: Any) -> Any:
    from moe_trm_sglang_cpu.batched_attention import BatchedAttention

    logging.getLogger(__name__).info("kernels for a CPU are loaded")
    return BatchedAttention(runner)
