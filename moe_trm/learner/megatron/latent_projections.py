"""Down-projections of latent attention, whole on every tensor-parallel rank, as in Transformer Engine's layers.

Megatron's local layers cut them. Then the rotated key, which all heads share, gets the gradient of one rank's heads
only.
"""

from __future__ import annotations

from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def use_whole_down_projections(block: TransformerBlockSubmodules) -> None:
    """Put them into every layer of a block specification of local layers."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
