"""Latent attention as transformers computes it, out of Megatron's modules.

Down-projections are whole on every tensor-parallel rank, as in Transformer Engine's layers. Megatron's local layers cut
them. Then the rotated key, which all heads share, gets the gradient of one rank's heads only.
"""

from __future__ import annotations

from typing import Any

from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

from moe_trm.models.deepseek_v3 import LATENT_EPSILON

_NORMS = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")
"""Modules that can hold the norm of a latent: Transformer Engine's is part of the projection behind it."""


def use_whole_down_projections(block: TransformerBlockSubmodules) -> None:
    """Put them into every layer of a block specification of local layers."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear


def set_latent_epsilon(model: nn.Module) -> None:
    """Give the norms of latents transformers' epsilon; Megatron gives them that of the other norms."""
    for attention in model.modules():
        if isinstance(attention, MLASelfAttention):
            modules: list[Any] = [getattr(attention, name, None) for name in _NORMS]
            norms = [module for module in modules if hasattr(module, "eps")]
            assert len(norms) == (2 if attention.config.q_lora_rank else 1), "a latent has no norm here, or several"
            for norm in norms:
                norm.eps = LATENT_EPSILON
