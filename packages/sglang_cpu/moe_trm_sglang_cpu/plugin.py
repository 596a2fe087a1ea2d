"""SGLang plugin (entry-point group `sglang.srt.plugins`), loaded by SGLang itself in each of its processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    import torch

    if torch.cuda.is_available():
        return
    _register_allocator()
    _register_latent_attention()
    _register_sink_attention()
    if os.environ.get("MOE_TRM_SGLANG_LOOPS") != "1":
        _read_once()
        _register_batched_attention()
        _batch_experts()
        _widen_products()
        _fuse_norms()
        _shorten_results()
        _sort_faster()
        _gather_masks()
        _pack_routes()
        _forget_matrices()
        _walk_once()
        _share_prompts()
        _share_imports()
        _shorten_way()
        _keep_out_short_prefixes()
        _answer_straight()


def _read_once() -> None:
    """Environment variables are parsed when they change."""
    from sglang.srt.environ import EnvField

    from moe_trm_sglang_cpu.variables import wrap

    EnvField.get = wrap(EnvField.get)


def _register_batched_attention() -> None:
    """Decoding of all requests at once on the `torch_native` backend."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("torch_native")(_batched_attention)


def _batched_attention(runner: Any) -> Any:
    from moe_trm_sglang_cpu.batched_attention import BatchedAttention

    return BatchedAttention(runner)


def _batch_experts() -> None:
    """Experts of small batches in two products. SGLang looks the function up at every call."""
    from sglang.srt.layers.moe import fused_moe_native

    from moe_trm_sglang_cpu.batched_experts import wrap

    fused_moe_native.moe_forward_native = wrap(fused_moe_native.moe_forward_native)


def _widen_products() -> None:
    """Products with small matrices in float32. Where there is AMX, SGLang packs its matrices."""
    from sglang.srt.layers.quantization import unquant

    from moe_trm_sglang_cpu.linear import wrap

    if not unquant._is_cpu_amx_available:
        unquant.UnquantizedLinearMethod.apply = wrap(unquant.UnquantizedLinearMethod.apply)


def _fuse_norms() -> None:
    """Norms and rotations in few calls. The real kernels of SGLang, where they are installed, win."""
    import torch
    from sglang.srt.layers import layernorm

    from moe_trm_sglang_cpu.norms import norm_and_rotate, wrap

    if layernorm._is_cpu_amx_available:
        return
    layernorm.RMSNorm.forward_native = wrap(layernorm.RMSNorm.forward_native)
    # A plain function under the name of the kernel: the dispatcher would take longer than the work.
    if not hasattr(torch.ops.sgl_kernel, "fused_qk_norm_rope_cpu"):
        torch.ops.sgl_kernel.fused_qk_norm_rope_cpu = norm_and_rotate


def _shorten_results() -> None:
    """No work at the end of a pass for requests that go on."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components import batch_result_processor, output_streamer

    from moe_trm_sglang_cpu import decoded
    from moe_trm_sglang_cpu.results import wrap_finish, wrap_handling, wrap_sending

    Req.update_finish_state = wrap_finish(Req.update_finish_state)
    processor = batch_result_processor.SchedulerBatchResultProcessor
    processor._handle_finish_state_updated_req = wrap_handling(processor._handle_finish_state_updated_req)
    processor.process_batch_result_decode = decoded.wrap(processor.process_batch_result_decode)
    streamer, every = output_streamer.SchedulerOutputStreamer, output_streamer.DEFAULT_FORCE_STREAM_INTERVAL
    streamer._stream_output_generation = wrap_sending(streamer._stream_output_generation, every)


def _sort_faster() -> None:
    """Sampling among the most probable tokens. SGLang looks the function up at every call."""
    from sglang.srt.layers import sampler

    from moe_trm_sglang_cpu.sampling import wrap

    name = "top_k_top_p_min_p_sampling_from_probs_torch"
    setattr(sampler, name, wrap(getattr(sampler, name)))


def _gather_masks() -> None:
    """Sampling masks of a whole batch at once, where processes talk in pickle, which is SGLang's default."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_mask import SamplingMaskRows

    from moe_trm_sglang_cpu.masks import Rows, wrap_adding, wrap_building, wrap_places, wrap_sharing

    if not envs.SGLANG_USE_PICKLE_IPC.get():
        return
    processor = SchedulerBatchResultProcessor
    Sampler._build_sampling_mask_output = wrap_building(Sampler._build_sampling_mask_output)
    processor.materialize_sampling_mask_output = staticmethod(wrap_sharing(processor.materialize_sampling_mask_output))
    processor.add_sampling_mask_return_values = wrap_adding(processor.add_sampling_mask_return_values)
    for name in ("_make_sampling_mask_batch_indices", "_make_sampling_support_logprobs_capture_indices"):
        setattr(SamplingBatchInfo, name, staticmethod(wrap_places(getattr(SamplingBatchInfo, name))))
    schedule_batch.SamplingMaskRows = type("Rows", (Rows,), {"native": SamplingMaskRows, "__slots__": ()})


def _pack_routes() -> None:
    """Routes of a pass in one copy; those of finished requests as bytes, where processes talk in pickle.

    That is SGLang's default.
    """
    from sglang.srt.environ import envs
    from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

    from moe_trm_sglang_cpu.routes import wrap_end, wrap_gathering

    RoutedExpertsCapturer.on_forward_end = wrap_end(RoutedExpertsCapturer.on_forward_end)
    if envs.SGLANG_USE_PICKLE_IPC.get():
        RoutedExpertsCapturer.get_topk = wrap_gathering(RoutedExpertsCapturer.get_topk)


def _forget_matrices() -> None:
    """Copies of weights are dropped, and requests that have ended, before what may change weights."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from moe_trm_sglang_cpu.layer_matrices import forget_after
    from moe_trm_sglang_cpu.settled import settle_before

    target = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
    HookRegistry.register(target, forget_after, HookType.BEFORE)
    HookRegistry.register(target, settle_before, HookType.BEFORE)


def _walk_once() -> None:
    """Checksums of the loaded weights without walks through the model for each question about it."""
    from sglang.srt.managers import tokenizer_control_mixin
    from sglang.srt.managers.io_struct import ChecksumInfo
    from sglang.srt.utils import weight_checker

    from moe_trm_sglang_cpu import checksums

    checker = weight_checker.WeightChecker
    checker._compute_checksum = checksums.wrap(checker._compute_checksum, weight_checker)
    unpack = tokenizer_control_mixin.msgspec_to_builtins
    tokenizer_control_mixin.msgspec_to_builtins = checksums.wrap_unpacking(unpack, ChecksumInfo)


def _share_prompts() -> None:
    """Prompts of groups are computed once."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from moe_trm_sglang_cpu.shared_prompts import wrap

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw", wrap, HookType.AROUND)


def _share_imports() -> None:
    """Processes that are forks, and one model's code."""
    from moe_trm_sglang_cpu import processes

    processes.register()


def _shorten_way() -> None:
    """The way of a request to the scheduler: few layers, also during a pause."""
    from moe_trm_sglang_cpu import front, paused

    front.register()
    paused.register()


def _keep_out_short_prefixes() -> None:
    """No work of the prefix cache for a few tokens."""
    from moe_trm_sglang_cpu import short_prefixes

    short_prefixes.register()


def _answer_straight() -> None:
    """Answers without a text past the detokenizer, where processes talk in pickle, which is SGLang's default."""
    from sglang.srt.environ import envs

    from moe_trm_sglang_cpu import answers, direct

    if envs.SGLANG_USE_PICKLE_IPC.get():
        answers.register()
        direct.register()


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
    if not isinstance(import_module("triton"), InertModule):
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("triton")(_sink_attention)


def _sink_attention(runner: Any) -> Any:
    from moe_trm_sglang_cpu.sink_attention import SinkAttention

    return SinkAttention(runner)
