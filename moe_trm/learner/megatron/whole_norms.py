"""Norms over the queries, and over the keys, of all heads together. Megatron-Core only has norms head by head.

Shape letters: S columns, B rows, N heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class _WholeNorm(torch.nn.RMSNorm):
    def __init__(self, config: TransformerConfig, heads: int, hidden_size: int, eps: float) -> None:
        assert config.tensor_model_parallel_size == 1, "each rank would norm its own heads only"
        super().__init__(heads * hidden_size, eps=eps, dtype=config.params_dtype)

    def forward(self, heads_SBND: Tensor) -> Tensor:
        return super().forward(heads_SBND.flatten(-2)).view(heads_SBND.shape)


class QueryNorm(_WholeNorm):
    """RMS norm of `[S, B, N, D]` over the last two dimensions, of all query heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_options: Any) -> None:
        super().__init__(config, config.num_attention_heads, hidden_size, eps)


class KeyNorm(_WholeNorm):
    """The same of all key heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_options: Any) -> None:
        super().__init__(config, config.num_query_groups, hidden_size, eps)


def use_whole_norms(block: TransformerBlockSubmodules) -> None:
    """Put these norms into every layer of a block specification."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
