"""Latent attention as transformers computes it, out of Megatron's modules.

Down-projections are whole on every tensor-parallel rank, as in Transformer Engine's layers. Megatron's local layers cut
them. Then the rotated key, which all heads share, gets the gradient of one rank's heads only.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from moe_trm.models.deepseek_v3 import LATENT_EPSILON

_NORMS = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")
"""Modules that can hold the norm of a latent: Transformer Engine's is part of the projection behind it."""


def use_whole_down_projections(block: TransformerBlockSubmodules) -> None:
    """Put them into every layer of a block specification of local layers."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear


class NormedUpProjection(ColumnParallelLinear):  # type: ignore[misc]
    """Norm of a latent and the projection out of it in one module, named as in Transformer Engine's layers."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.eps = LATENT_EPSILON
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor, *options: Any) -> Any:
        """`[S, B, latent]` of this rank -> `[S, B, its part of the output]`, and no bias, as the projection alone."""
        normed = nn.functional.rms_norm(input_, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps)
        return super().forward(normed, *options)


def norm_keys_alone(block: TransformerBlockSubmodules, *, is_fused: bool) -> None:
    """Let the latent of keys and values have a norm where queries have no latent.

    Megatron-Core 0.19 has one switch for the norms of both, so it is off, and the projection brings the norm.
    `is_fused`: layers of Transformer Engine.
    """
    projection: type = NormedUpProjection
    if is_fused:
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

        # Its own class would be refused with the switch off.
        projection = type("NormedUpProjection", (TELayerNormColumnParallelLinear,), {})
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.linear_kv_up_proj = projection


def set_latent_epsilon(model: nn.Module) -> None:
    """Give the norms of latents transformers' epsilon; Megatron gives them that of the other norms."""
    for attention in model.modules():
        if isinstance(attention, MLASelfAttention):
            modules: list[Any] = [getattr(attention, name, None) for name in _NORMS]
            norms = [module for module in modules if hasattr(module, "eps")]
            assert len(norms) == (2 if attention.config.q_lora_rank else 1), "a latent has no norm here, or several"
            for norm in norms:
                norm.eps = LATENT_EPSILON
