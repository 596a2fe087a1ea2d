"""Transformer layers for Megatron-Core that need neither Transformer Engine nor Apex.

Used on CPU. Shape letters: S padded sequence length, B rows, N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """RMS norm that allows sequence parallelism.

    Megatron's own torch norm refuses it. The flag on the weight makes `finalize_model_grads` sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_options: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal softmax attention over right-padded rows, with grouped key/value heads.

    Rows are padded on the right, so a real token never sees padding under the causal mask and no mask tensor is needed: the same
    kernel runs with and without gradient, which keeps scoring and training passes bit-identical.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_options: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """`query` `[S, B, N, D]`, `key` and `value` `[S, B, G, D]` -> `[S, B, N * D]`. The mask is causal whatever `attention_mask` says."""
        assert packed_seq_params is None, "rows are padded, not packed, in this layer"
        length, rows, heads, dim = query.shape
        repeats = heads // key.shape[2]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
        query_BNSD, key_BNSD, value_BNSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        context_BNSD = F.scaled_dot_product_attention(
            query_BNSD, key_BNSD, value_BNSD, dropout_p=dropout, is_causal=True, scale=self.scale
        )
        return context_BNSD.permute(2, 0, 1, 3).reshape(length, rows, heads * dim)


def cpu_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder layers this pipeline stage builds: Megatron's local layers with `RMSNorm` and `CausalAttention`."""
    frequency = config.moe_layer_freq
    is_moe = frequency if isinstance(frequency, list) else [int(i % frequency == 0) for i in range(config.num_layers)]
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [_layer_spec(config, config.num_moe_experts if is_moe[i] else None) for i in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
