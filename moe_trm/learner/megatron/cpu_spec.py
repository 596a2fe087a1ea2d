"""Transformer layers for Megatron-Core that need neither Transformer Engine nor Apex.

Used on CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from moe_trm.learner.megatron.cpu_attention import CausalAttention, CausalSinkAttention
from moe_trm.learner.megatron.cpu_experts import GroupedExperts
from moe_trm.learner.megatron.exact import FixedAttention
from moe_trm.learner.megatron.specs import submodules_of, with_module


class RMSNorm(torch.nn.RMSNorm):
    """RMS norm that allows sequence parallelism.

    Megatron's own torch norm refuses it. The flag on the weight makes `finalize_model_grads` sum its gradient over
    tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_options: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def cpu_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Decoder layers of this pipeline stage: Megatron's, with norms, attention and experts in plain torch."""
    frequency = config.moe_layer_freq
    is_moe = frequency if isinstance(frequency, list) else [int(i % frequency == 0) for i in range(config.num_layers)]
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [_layer_spec(config, config.num_moe_experts if is_moe[i] else None) for i in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    if num_experts:
        layer = submodules_of(spec.submodules.mlp)
        layer.experts = with_module(layer.experts, GroupedExperts)
    attention = spec.submodules.self_attention.submodules
    if config.batch_invariant_mode:
        attention.core_attention = FixedAttention
    else:
        attention.core_attention = CausalSinkAttention if config.softmax_type == "learnable" else CausalAttention
    if config.multi_latent_attention:
        if config.q_lora_rank:
            attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
