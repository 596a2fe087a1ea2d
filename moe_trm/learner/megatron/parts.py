"""This rank among those that hold parts of the same rows: column slices, matrix shards, pipeline stages.

Shape letters: B rows, R columns of a micro-batch, C columns that this rank feeds to the model, P channels of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from moe_trm.learner.scoring import whole_channels
from moe_trm.types import TokenBatch
from routing.layout.packed import AnyLayout, PackedLayout
from routing.layout.padded import Layout, padding_multiple
from routing.record.sources import row_lengths

KNOWN = 16
"""Layouts of packs that are kept."""


class Parts:
    """Cuts micro-batches for this rank and brings results together again. Needs initialised Megatron parallel groups.

    Tensor parallelism always comes with sequence parallelism here. The number of columns that a rank computes is a
    multiple of `columns`. `packed`: micro-batches are forwarded as packs of their tokens, not as padded rows.

    Attributes:
        is_data_leader: whether this rank speaks for its rows: the first of the ranks that share them.
        on_last_stage: whether this rank computes scores.
    """

    def __init__(self, columns: int = 1, *, packed: bool = False) -> None:
        self._columns, self._packed = columns, packed
        self._packs: dict[PackedLayout, PackedLayout] = {}
        self._slices = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self.is_data_leader = all(group.rank() == 0 for group in (*self._slices, self._stages))
        self.on_last_stage = self._stages.rank() == self._stages.size() - 1

    def padded(self, batch: TokenBatch) -> TokenBatch:
        """`batch` with padding columns added until it can be cut evenly; a pack has alignment columns instead.

        Fields that only objectives read stay as they are.
        """
        length = batch.input_ids.shape[1]
        tensor, context = self._slices
        more = -length % (self._columns * padding_multiple(context.size(), tensor.size()))
        if not more or self._packed:
            return batch
        input_ids, target_ids, valid, mask = (
            F.pad(values, (0, more)) for values in (batch.input_ids, batch.target_ids, batch.valid, batch.mask)
        )
        return replace(batch, input_ids=input_ids, target_ids=target_ids, valid=valid, mask=mask)

    def layout(self, batch: TokenBatch) -> AnyLayout:
        """Layout by which this rank cuts the padded `batch`."""
        rows, length = batch.input_ids.shape
        tensor, context = self._slices
        ranks = context.size(), context.rank(), tensor.size(), tensor.rank()
        if self._packed:
            pack = PackedLayout(tuple(row_lengths(batch.valid)), length, *ranks)
            # A micro-batch is scored and then trained: what its layout has computed serves both.
            pack_key = self._packs.get(pack, pack)
            self._packs = {pack_key: pack_key} if len(self._packs) >= KNOWN else self._packs | {pack_key: pack_key}
            return pack_key
        return Layout(rows, length, *ranks)

    def whole_rows(self, channels_PBC: Tensor, layout: AnyLayout) -> Tensor:
        """`[P, B, C]` scores of this rank's columns (`[P, 1, C]` of a pack) -> `[P, B, R]`, the same bits everywhere.

        The gradient reaches this rank's own columns only: each rank computes the loss of the whole rows, and gradients
        of parameters are summed over the ranks.
        """
        channels_PBR = whole_channels(channels_PBC, layout)
        if layout.cp_size == 1:
            return channels_PBR
        return _WithOthers.apply(channels_PBR, self._slices[1])  # type: ignore[no-untyped-call, no-any-return, unused-ignore]

    def from_last_stage(
        self, channels: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], device: torch.device
    ) -> list[Tensor]:
        """The channels that the last stage computed, of the given shapes, on every stage. Collective over stages."""
        if self._stages.size() == 1:
            return list(channels)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.empty(sum(sizes), device=device)
        if self.on_last_stage:
            flat = torch.cat([channel.flatten() for channel in channels])
        dist.broadcast(flat, group=self._stages, group_src=self._stages.size() - 1)
        return [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]

    def sum_over_slices(self, values: Tensor) -> Tensor:
        """Sum over the ranks that hold other columns of the same rows and the same layers."""
        return _summed(values, self._slices)

    def sum_over_stages(self, values: Tensor) -> Tensor:
        """Sum over the ranks that hold other layers."""
        return _summed(values, (self._stages,))


def _summed(values: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    total = values.clone()
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    return total


class _WithOthers(torch.autograd.Function):
    """Sum over a group whose other ranks' values are constants."""

    @staticmethod
    def forward(_ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
