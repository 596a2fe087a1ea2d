"""Attention with a sink per head and, in some layers, over a window, in plain torch.

Megatron's own needs Transformer Engine for rows that context-parallel ranks share.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from moe_trm.learner.megatron.cpu_attention import CausalAttention
from moe_trm.learner.sequence_attention import AttentionKind


class CausalSinkAttention(CausalAttention):
    """Causal attention with sinks: each head's softmax has one more term, a learned logit that has weight but no value.

    `w_s = exp(q.k_s * scale) / (exp(sink) + sum_t exp(q.k_t * scale))` over the visible columns `t`: all up to the
    token's own, or the last `window_size[0] + 1` of them in layers with a window. The softmax is computed in float32.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *args: Any, **options: Any) -> None:
        super().__init__(config, layer_number, *args, **options)
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.columns_before: int | None = config.window_size[0] if is_windowed else None
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

    def kind(self) -> AttentionKind:
        """This layer's attention, as packs need it."""
        return AttentionKind(
            self.scale, self.dropout if self.training else 0.0, self.columns_before, self.softmax_offset
        )
