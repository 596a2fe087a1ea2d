"""Attention over the columns of all context-parallel ranks, in plain torch: Megatron's own needs Transformer Engine. Imported in ranks only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_trm.learner.megatron.cpu_spec import CausalAttention
from routing import Layout


class GatherSequence(torch.autograd.Function):
    """Keys or values of all context-parallel ranks along the first dimension; gradients are summed back to their owner."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


class ContextAttention(CausalAttention):
    """Causal attention of this rank's columns over everyone's."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_rest: Any, **_options: Any) -> Tensor:
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        length, rows, heads, dim = query.shape
        layouts = [Layout(rows, length * group.size(), group.size(), rank) for rank in range(group.size())]
        key, value = (GatherSequence.apply(x, group).repeat_interleave(heads // x.shape[2], 2) for x in (key, value))
        columns = torch.cat([layout.positions() for layout in layouts])
        seen = columns[None, :] <= layouts[group.rank()].positions()[:, None]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
        return context.permute(2, 0, 1, 3).reshape(length, rows, heads * dim)
