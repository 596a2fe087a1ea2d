"""Attention in plain torch: of whole rows or packs, and of the columns that context-parallel ranks share.

Used on CPU, where Megatron's own needs Transformer Engine and CUDA. Shape letters: S columns of whole rows, C columns
of this rank, B rows, N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from moe_trm.learner.sequence_attention import AttentionKind, attend, attend_within, for_all_heads
from routing.layout.padded import Layout


@dataclass
class PlainPack(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a pack, for layers whose angles are made of positions: lengths, and no starts.

    Attributes:
        lengths: places of each sequence, alignment included.
    """

    lengths: tuple[int, ...] = ()


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal softmax attention over right-padded rows or the sequences of a pack, with grouped key/value heads.

    Rows are padded on the right, so under the causal mask a real token never sees padding. No mask tensor is needed.
    The same kernel runs with and without gradient, so scoring and training passes are bit-identical.
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
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention as Megatron asks for it; see `rows`, and with `packed_seq_params` see `packed`.

        The mask is causal whatever `attention_mask` says.
        """
        if packed_seq_params is not None:
            return self.packed(query, key, value, packed_seq_params)
        return self.rows(query, key, value)

    def rows(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query` `[C, B, N, D]`, `key` and `value` `[C, B, G, D]` -> `[C, B, N * D]`.

        Where ranks share rows, every rank gathers all keys and values, so memory does not shrink with more ranks: it is
        there to run layouts with context parallelism without a GPU.
        """
        group = parallel_state.get_context_parallel_group()
        before_CS = None
        if group.size() > 1:
            before_CS = _columns_before(query.shape[0] * group.size(), group)
            key, value = (_Gathered.apply(x, group) for x in (key, value))  # type: ignore[no-untyped-call, unused-ignore]
        key, value = for_all_heads(query.shape[2], key, value)
        seen = key.transpose(0, 1), value.transpose(0, 1)
        return attend(query.transpose(0, 1), *seen, self.kind(), before_CS).transpose(0, 1).flatten(2)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, parameters: PackedSeqParams) -> Tensor:
        """`query` `[C, N, D]`, `key` and `value` `[C, G, D]` of this rank's part of a pack -> `[C, N * D]`.

        Each sequence by itself. Where ranks share sequences, every rank gathers all keys and values.
        """
        group = parallel_state.get_context_parallel_group()
        is_plain = isinstance(parameters, PlainPack)
        lengths = parameters.lengths if is_plain else parameters.cu_seqlens_q.diff().tolist()
        if group.size() == 1:
            return attend_within(query, key, value, lengths, self.kind()).flatten(1)
        local_lengths = [length // group.size() for length in lengths]
        key, value = (
            _Gathered.apply(x, group).unflatten(0, (group.size(), -1))  # type: ignore[no-untyped-call, unused-ignore]
            for x in (key, value)
        )
        key, value = for_all_heads(query.shape[1], key, value)
        kind, contexts = self.kind(), []
        cuts = (
            torch.split(query, local_lengths),
            torch.split(key, local_lengths, 1),
            torch.split(value, local_lengths, 1),
        )
        for length, query_CND, key_RCND, value_RCND in zip(lengths, *cuts, strict=True):
            key_SND, value_SND = key_RCND.flatten(0, 1), value_RCND.flatten(0, 1)
            before_CS = _columns_before(length, group)
            contexts.append(attend(query_CND[None], key_SND[None], value_SND[None], kind, before_CS)[0])
        return torch.cat(contexts).flatten(1)

    def kind(self) -> AttentionKind:
        """This layer's attention, as packs need it."""
        return AttentionKind(self.scale, self.dropout if self.training else 0.0)


def _columns_before(length: int, group: dist.ProcessGroup) -> Tensor:
    """`[C, S]` int64: by how many of `length` columns each of all ranks' is before each of this rank's."""
    positions = [Layout(1, length, group.size(), rank).positions() for rank in range(group.size())]
    return positions[group.rank()][:, None] - torch.cat(positions)[None, :]


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks of a group along the first dimension; gradients are summed back to their owner."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


class CausalSinkAttention(CausalAttention):
    """Causal attention with sinks: each head's softmax has one more term, a learned logit that has weight but no value.

    `w_s = exp(q.k_s * scale) / (exp(sink) + sum_t exp(q.k_t * scale))` over the visible columns `t`: all up to the
    token's own, or the last `window_size[0] + 1` of them in layers with a window. The softmax is computed in float32.
    Megatron's own needs Transformer Engine for rows that context-parallel ranks share.
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
