"""SGLang's Qwen3-MoE with its layers in one loop, where nothing is special about them.

Imported by SGLang's scheduler only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.eplb.expert_distribution import _ExpertDistributionRecorderNoop, get_global_expert_distribution_recorder
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.qwen3_moe import Qwen3MoeAttention, Qwen3MoeDecoderLayer, Qwen3MoeSparseMoeBlock
from sglang.srt.runtime_context import get_parallel
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from torch import Tensor

from moe_trm_sglang_cpu import routes
from moe_trm_sglang_cpu.batched_attention import BatchedAttention
from moe_trm_sglang_cpu.layer_matrices import kept_matrices
from moe_trm_sglang_cpu.norms import signed_turn
from moe_trm_sglang_cpu.whole_layers import through_layers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def wrap(native: Callable[..., Any]) -> Callable[..., Any]:
    """`Qwen3MoeModel.forward`, which is `native`, in one loop where the model and the pass are plain."""

    def forward(
        model: Any,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        backend, capturer = get_attn_backend(), get_global_experts_capturer()
        routes.forget(capturer)
        plain = (
            type(backend) is BatchedAttention
            and backend.is_planned
            and input_embeds is None
            and pp_proxy_tensors is None
            and not forward_batch.can_run_tbo
            and not model.layers_to_capture
        )
        layers = kept_matrices(model, is_plain) if plain and len(input_ids) else None
        if layers is None:
            return native(model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        hidden_ND = model.embed_tokens(input_ids)
        rotation = model.layers[0].self_attn.rotary_emb
        turn = signed_turn(rotation.cos_sin_cache, positions, hidden_ND.dtype)
        attend = backend.attend_of(forward_batch)
        return through_layers(hidden_ND, layers, model.norm.weight, turn, attend, routes.begin(capturer))

    return forward


def is_plain(model: Any) -> bool:
    """True if `whole_layers` computes what SGLang would: one rank, whole weights, nothing that listens in between."""
    parallel = get_parallel()
    return (
        parallel.tp_size == parallel.pp_size == parallel.moe_ep_size == 1
        and type(get_global_expert_distribution_recorder()) is _ExpertDistributionRecorderNoop
        and not envs.SGLANG_SIMULATE_UNIFORM_EXPERTS.get()
        and not envs.SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS.get()
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        and len({weight.dtype for weight in model.parameters()}) == 1
        and next(model.parameters()).dtype in DTYPES
        and all(type(layer) is Qwen3MoeDecoderLayer and _is_plain(layer) for layer in model.layers)
        and [layer.mlp.topk.layer_id for layer in model.layers] == [*range(len(model.layers))]
        and len({layer.mlp.topk.topk_config.top_k for layer in model.layers}) == 1
        and len({_eps(layer) for layer in model.layers} | {frozenset({model.norm.variance_epsilon})}) == 1
        and _plain_norm(model.norm)
    )


def _is_plain(layer: Any) -> bool:
    attention, block = layer.self_attn, layer.mlp
    if type(attention) is not Qwen3MoeAttention or type(block) is not Qwen3MoeSparseMoeBlock:
        return False
    linears = {attention.qkv_proj: QKVParallelLinear, attention.o_proj: RowParallelLinear, block.gate: ReplicatedLinear}
    norms = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
    return (
        all(type(linear) is kind and _plain_linear(linear) for linear, kind in linears.items())
        and all(_plain_norm(norm) for norm in norms)
        and _plain_rotation(attention)
        and _plain_attention(attention.attn)
        and _plain_experts(block.experts)
        and _plain_choice(block.topk)
    )


def _eps(layer: Any) -> frozenset[float]:
    attention = layer.self_attn
    norms = (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
    return frozenset(norm.variance_epsilon for norm in norms)


def _plain_linear(linear: Any) -> bool:
    return type(linear.quant_method) is UnquantizedLinearMethod and linear.bias is None


def _plain_norm(norm: Any) -> bool:
    return type(norm) is RMSNorm and not (
        norm.cast_x_before_out_mul
        or norm.fp32_residual
        or norm.override_orig_dtype is not None
        or norm.variance_size_override is not None
    )


def _plain_rotation(attention: Any) -> bool:
    rotation = attention.rotary_emb
    whole = rotation.rotary_dim == rotation.head_size == attention.head_dim
    return type(rotation) is RotaryEmbedding and rotation.is_neox_style and whole


def _plain_attention(attention: Any) -> bool:
    return (
        attention.sliding_window_size in (None, -1)
        and not attention.logit_cap
        and not attention.is_cross_attention
        and attention.quant_method is None
        and attention.qk_head_dim == attention.v_head_dim
    )


def _plain_experts(experts: Any) -> bool:
    config = experts.moe_runner_config
    return (
        type(experts) is FusedMoE
        and type(experts.quant_method) is UnquantizedFusedMoEMethod
        and config.activation == "silu"
        and config.gemm1_alpha is None
        and not config.apply_router_weight_on_input
        and getattr(experts, "w13_weight_bias", None) is None
        and getattr(experts, "w2_weight_bias", None) is None
        and not experts._dwdp_bound
    )


def _plain_choice(chooser: Any) -> bool:
    config = chooser.topk_config
    return (
        config.scoring_func == "softmax"
        and not config.use_grouped_topk
        and config.custom_routing_function is None
        and config.correction_bias is None
        and config.num_shared_topk_slots == 0
        and config.routed_scaling_factor in (None, 1.0)
        and not config.apply_routed_scaling_factor_on_output
        and config.allow_routed_experts_capture
        and not chooser.enable_waterfill
    )
