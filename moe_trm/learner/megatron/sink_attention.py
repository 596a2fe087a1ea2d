"""Attention with a sink per head and, in some layers, over a window, in plain torch.

Megatron's own needs Transformer Engine for rows that context-parallel ranks share. Shape letters: S columns of whole
rows, C columns of this rank, B rows, N query heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from moe_trm.learner.megatron.cpu_attention import CausalAttention, everyones
from moe_trm.learner.sequence_attention import AttentionKind


class SinkAttention(CausalAttention):
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

    def rows(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query` `[C, B, N, D]`, `key` and `value` `[C, B, G, D]` -> `[C, B, N * D]`."""
        columns, rows, heads, dim = query.shape
        key, value, positions_S, own_C = everyones(key, value, parallel_state.get_context_parallel_group())
        query_BNCD, key_BNSD, value_BNSD = (
            x.repeat_interleave(heads // x.shape[2], 2).permute(1, 2, 0, 3) for x in (query, key, value)
        )
        before_CS = own_C[:, None] - positions_S[None, :]
        hidden_CS = before_CS < 0
        if self.columns_before is not None:
            hidden_CS |= before_CS > self.columns_before
        logits_BNCS = (query_BNCD @ key_BNSD.mT * self.scale).float().masked_fill(hidden_CS, -torch.inf)
        sinks_BNC1 = self.softmax_offset.float()[None, :, None, None].expand(rows, -1, columns, 1)
        weights_BNCS = torch.cat([logits_BNCS, sinks_BNC1], -1).softmax(-1)[..., :-1].to(value.dtype)
        weights_BNCS = torch.dropout(weights_BNCS, self.dropout, self.training)
        return (weights_BNCS @ value_BNSD).permute(2, 0, 1, 3).reshape(columns, rows, heads * dim)

    def kind(self) -> AttentionKind:
        """This layer's attention, as packs need it."""
        return AttentionKind(
            self.scale, self.dropout if self.training else 0.0, self.columns_before, self.softmax_offset
        )
