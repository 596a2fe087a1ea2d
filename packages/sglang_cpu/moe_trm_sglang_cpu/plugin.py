"""SGLang plugin `moe_trm_sglang_cpu`: what SGLang lacks on a CPU. SGLang loads it in each of its processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from moe_trm_sglang_cpu.inert_triton import InertModule


def allocate_plain(
    dims: Sequence[int],
    dtype: Any,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> Any:
    """A host buffer without CUDA registration. Same signature as SGLang's own entries of `ALLOC_MEMORY_FUNCS`."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def activate() -> None:
    """Register what SGLang lacks on a CPU, in its own registries, unless it brings it."""
    if without_cuda():
        _register_device_module()
        _register_allocator()
        _register_latent_attention()
        if isinstance(import_module("triton"), InertModule):
            _register_sink_attention()
            _register_elementwise()


def without_cuda() -> bool:
    """True where SGLang serves on a CPU, by its own switch."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return False
    import torch

    return not torch.cuda.is_available()


def _register_device_module() -> None:
    """`torch.get_device_module()` is `torch.cpu`, as its description says, also in a CUDA build of torch 2.14.

    There it is `torch.cuda`, which fails without a driver. SGLang 0.5.23 corrects its own function of this name, but
    calls torch's where a server lends its memory, and in Qwen3-Next.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("torch.get_device_module", module_of, HookType.AROUND)


def module_of(native: Callable[[Any], Any], device: Any = None) -> Any:
    """Hook around `torch.get_device_module`, which is `native`."""
    return native("cpu" if device is None else device)


def _register_allocator() -> None:
    """The host buffers of `--enable-return-routed-experts`."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    # A default dict whose fallback registers the buffer with CUDA: membership, not lookup, tells whether "cpu" is
    # known.
    if "cpu" not in ALLOC_MEMORY_FUNCS:
        ALLOC_MEMORY_FUNCS["cpu"] = allocate_plain


def _register_latent_attention() -> None:
    """Latent attention (DeepSeek's MLA) on the `torch_native` backend, over cached latents in prefill and decoding.

    SGLang 0.5.23 has no code for this backend and uses triton's: a prefill without a prefix unpacks keys and values and
    passes them uncached. `torch_native` takes keys and values from the cache only, where the latents are. So it fails,
    or attends to the latents where their widths equal those of the heads.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler

    registry = attention_backend_handler.AttentionBackendRegistry
    if "torch_native" not in registry._handlers:
        registry.register("torch_native", attention_backend_handler._dispatch_mla_subtype)


def _register_sink_attention() -> None:
    """Attention with sinks (gpt-oss) under the name `triton`, in torch, where the real triton is absent.

    SGLang accepts gpt-oss with this backend's name and some of CUDA, ROCm, Ascend and AMX; `torch_native` knows no
    sinks.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("triton")(_sink_attention)


def _register_elementwise() -> None:
    """MiniMax-M2's norms, the gated norm of the delta rule and the gate of Qwen's shared expert, without triton."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from moe_trm_sglang_cpu.elementwise import gated, over_all_heads, shared_gate

    operators = "sglang.kernels.ops"
    for target, around in {
        "sglang.srt.models.minimax_m2.MiniMaxM2QKRMSNorm._forward_naive": over_all_heads,
        f"{operators}.attention.fla.fused_norm_gate.FusedRMSNormGated.forward": gated,
        f"{operators}.attention.fla.layernorm_gated.RMSNorm.forward": gated,
        f"{operators}.elementwise.elementwise._launch_fused_gate_sigmoid_mul": shared_gate,
    }.items():
        HookRegistry.register(target, around, HookType.AROUND)


def _sink_attention(runner: Any) -> Any:
    from moe_trm_sglang_cpu.sink_attention import SinkAttention

    return SinkAttention(runner)
