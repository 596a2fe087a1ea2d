"""Attention in plain torch: of whole rows or packs, and of the columns that context-parallel ranks share.

Used on CPU, where Megatron's own needs Transformer Engine and CUDA. Shape letters: S columns of whole rows, C columns
of this rank, B rows, N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from moe_trm.learner.megatron.rotation import Rotation
from moe_trm.learner.sequence_attention import AttentionKind, attend, attend_within, for_all_heads
from routing.layout import Layout


@dataclass
class PlainPack(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a pack, for layers whose angles are made of positions: lengths, and no starts.

    Attributes:
        lengths: places of each sequence, alignment included.
        rotation: of queries and keys, where the layers do not get angles to rotate them themselves; set by the model.
    """

    lengths: tuple[int, ...] = ()
    rotation: Rotation | None = None


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
        """`query` `[S, B, N, D]`, `key` and `value` `[S, B, G, D]` -> `[S, B, N * D]`; values may have another D."""
        length, rows, heads, _ = query.shape
        repeats = heads // key.shape[2]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
        query_BNSD, key_BNSD, value_BNSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        context_BNSD = F.scaled_dot_product_attention(
            query_BNSD, key_BNSD, value_BNSD, dropout_p=dropout, is_causal=True, scale=self.scale
        )
        return context_BNSD.permute(2, 0, 1, 3).reshape(length, rows, -1)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, parameters: PackedSeqParams) -> Tensor:
        """`query` `[C, N, D]`, `key` and `value` `[C, G, D]` of this rank's part of a pack -> `[C, N * D]`.

        Each sequence by itself. Where ranks share sequences, every rank gathers all keys and values.
        """
        group = parallel_state.get_context_parallel_group()
        if isinstance(parameters, PlainPack):
            lengths = parameters.lengths
            if parameters.rotation is not None:
                query, key = parameters.rotation.apply(query), parameters.rotation.apply(key)
        else:
            lengths = parameters.cu_seqlens_q.diff().tolist()
        if group.size() == 1:
            return attend_within(query, key, value, lengths, self.kind()).flatten(1)
        own = [length // group.size() for length in lengths]
        key, value = (
            _Gathered.apply(x, group).unflatten(0, (group.size(), -1))  # type: ignore[no-untyped-call]
            for x in (key, value)
        )
        key, value = for_all_heads(query.shape[1], key, value)
        kind, contexts = self.kind(), []
        cuts = (torch.split(query, own), torch.split(key, own, 1), torch.split(value, own, 1))
        for length, query_CND, key_RCND, value_RCND in zip(lengths, *cuts, strict=True):
            positions = [Layout(1, length, group.size(), rank).positions() for rank in range(group.size())]
            before_CS = positions[group.rank()][:, None] - torch.cat(positions)[None, :]
            key_SND, value_SND = key_RCND.flatten(0, 1), value_RCND.flatten(0, 1)
            contexts.append(attend(query_CND[None], key_SND[None], value_SND[None], kind, before_CS)[0])
        return torch.cat(contexts).flatten(1)

    def kind(self) -> AttentionKind:
        """This layer's attention, as packs need it."""
        return AttentionKind(self.scale, self.dropout if self.training else 0.0)


class ContextAttention(CausalAttention):
    """Causal attention of this rank's columns over everyone's.

    Every rank gathers all keys and values, so memory does not shrink with more ranks: it is there to run layouts with
    context parallelism without a GPU.
    """

    def rows(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query` `[C, B, N, D]`, `key` and `value` `[C, B, G, D]` -> `[C, B, N * D]`."""
        columns, rows, heads, dim = query.shape
        key, value, positions_S, own_C = everyones(key, value, parallel_state.get_context_parallel_group())
        key, value = (x.repeat_interleave(heads // x.shape[2], 2) for x in (key, value))
        seen_CS = positions_S[None, :] <= own_C[:, None]
        query_BNCD, key_BNSD, value_BNSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        context_BNCD = F.scaled_dot_product_attention(
            query_BNCD, key_BNSD, value_BNSD, attn_mask=seen_CS, dropout_p=dropout, scale=self.scale
        )
        return context_BNCD.permute(2, 0, 1, 3).reshape(columns, rows, heads * dim)


def everyones(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values `[S, B, G, D]` of all ranks that share the rows, and the positions of columns.

    Positions are `[S]` of all columns and `[C]` of this rank's.
    """
    columns, rows = key.shape[:2]
    layouts = [Layout(rows, columns * group.size(), group.size(), rank) for rank in range(group.size())]
    if group.size() > 1:
        key, value = (_Gathered.apply(x, group) for x in (key, value))  # type: ignore[no-untyped-call]
    positions_S = torch.cat([layout.positions() for layout in layouts])
    return key, value, positions_S, layouts[group.rank()].positions()


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
