"""The second opinion on a replayed forward: what each token should have used, cut by plain index arithmetic.

Nothing here goes through the maps of a layout; only its sizes are read. A mistake in the shared map therefore shows as
a mismatch between the dispatcher's routing map and the cut made here.

Shape letters: B sequences, R columns, N local tokens in router order, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from routing.layout.packed import AnyLayout, PackedLayout
from routing.record.record import RouteRecord
from routing.replay.cut import layers_first


@lru_cache(maxsize=4)
def locate(layout: AnyLayout) -> tuple[np.ndarray, np.ndarray]:
    """`[N]` sequence and `[N]` column of the micro-batch for each local token.

    With padded rows, local token `n` is sequence `n % B` of shard row `n // B`. In a pack, sequences follow each other;
    columns behind the tokens of their sequence are alignment. A forward asks several times: the answer is not to be
    written to.
    """
    if isinstance(layout, PackedLayout):
        return _locate_packed(layout)
    columns_per_rank = layout.length // layout.cp_size
    rows_per_shard = columns_per_rank // layout.sp_size
    local = np.arange(layout.batch * rows_per_shard)
    sequence = local % layout.batch
    column = layout.sp_rank * rows_per_shard + local // layout.batch
    if layout.cp_size > 1:
        half = columns_per_rank // 2
        mirrored = 2 * layout.cp_size - 1 - layout.cp_rank
        column = np.where(column < half, layout.cp_rank * half + column, (mirrored - 1) * half + column)
    return sequence, column


def _locate_packed(layout: PackedLayout) -> tuple[np.ndarray, np.ndarray]:
    local_lengths = np.asarray(layout.places) // layout.cp_size
    sequence = np.repeat(np.arange(layout.batch), local_lengths)
    column = np.arange(len(sequence)) - np.repeat(np.cumsum(local_lengths) - local_lengths, local_lengths)
    if layout.cp_size > 1:
        half = (local_lengths // 2)[sequence]
        mirrored = 2 * layout.cp_size - 1 - layout.cp_rank
        column = np.where(column < half, layout.cp_rank * half + column, (mirrored - 1) * half + column)
    shard = len(sequence) // layout.sp_size
    mine = slice(layout.sp_rank * shard, (layout.sp_rank + 1) * shard)
    return sequence[mine], column[mine]


def sample_of_tokens(layout: AnyLayout) -> Tensor | None:
    """`[N]` int64: the sequence of each local token; None where it is `n % B`."""
    return torch.from_numpy(locate(layout)[0]) if isinstance(layout, PackedLayout) else None


def due_by_sample(due_N: Tensor, layout: AnyLayout) -> Tensor:
    """`[B]`: how many local tokens of each sequence `due_N` `[N]` has."""
    if not isinstance(layout, PackedLayout):
        return torch.from_numpy(due_N.numpy().reshape(-1, layout.batch).sum(0))
    return torch.from_numpy(np.bincount(locate(layout)[0][due_N.numpy()], minlength=layout.batch))


def due_tokens(lengths: Sequence[int], layout: AnyLayout) -> Tensor:
    """`[N]` bool: local tokens that are real, given the real tokens of each sequence."""
    sequence, column = locate(layout)
    return torch.from_numpy(column < np.asarray(lengths)[sequence])


def tokens_from(firsts: Sequence[int], layout: AnyLayout) -> Tensor | None:
    """`[N]` bool: local tokens from place `firsts` of their sequence on; None without `firsts`."""
    if not firsts:
        return None
    sequence, column = locate(layout)
    return torch.from_numpy(column >= np.asarray(firsts)[sequence])


def free_tokens(records: Sequence[RouteRecord | None], layout: AnyLayout) -> Tensor | None:
    """`[N]` bool: real local tokens without routes in their record; None when every record covers all its rows."""
    if all(record is None or record.covered is None for record in records):
        return None
    covered_B = [np.ones(0, bool) if record is None else record.coverage() for record in records]
    rows_B = np.array([len(covered) for covered in covered_B])
    sequence, column = locate(layout)
    real_N = column < rows_B[sequence]
    free_N = np.zeros(len(sequence), dtype=bool)
    first_B = np.cumsum(rows_B) - rows_B
    free_N[real_N] = ~np.concatenate(covered_B)[(first_B[sequence] + column)[real_N]]
    return torch.from_numpy(free_N)


def second_cut(routes_SLK: np.ndarray, rows_B: np.ndarray, layout: AnyLayout) -> np.ndarray:
    """`[L, N, K]` recorded ids in router order, of the routes of `stacked_routes`, `rows_B` of them for each sequence.

    Rows that are not due hold zeros and must not be read.
    """
    sequence, column = locate(layout)
    real = column < rows_B[sequence]
    first_B = np.cumsum(rows_B) - rows_B
    routes_NLK = np.zeros((len(column), *routes_SLK.shape[1:]), routes_SLK.dtype)
    if real.all():
        routes_SLK.take(first_B[sequence] + column, axis=0, out=routes_NLK)
    else:
        routes_NLK[real] = routes_SLK[(first_B[sequence] + column)[real]]
    return layers_first(routes_NLK)


def same_set(routing_map: Tensor, experts: Tensor) -> Tensor:
    """`[N]` bool: the boolean map `[N, E]` selects exactly the ids `[N, K]` of its row, no more and no fewer."""
    # Bytes summed as int16 are several times faster on a CPU than booleans summed as int64.
    num_chosen = routing_map.bool().view(torch.uint8).sum(1, dtype=torch.int16)
    return routing_map.gather(1, experts).all(1) & (num_chosen == experts.shape[1])


def shared(a_NK: Tensor, right: Tensor) -> Tensor:
    """`[N]` int16: how many ids two rows of distinct ids `[N, K]` have in common."""
    # Ids below 2^16 stay distinct in int16; the long dimension comes last, where comparing and summing run at the speed
    # of memory.
    left_KN, right_KN = (ids.t().to(torch.int16, memory_format=torch.contiguous_format) for ids in (a_NK, right))
    equal_KKN = (left_KN[:, None] == right_KN).view(torch.uint8)
    return equal_KKN.sum((0, 1), dtype=torch.int16)


@dataclass(frozen=True)
class DueTokens:
    """Local tokens of a micro-batch, on the host.

    Attributes:
        due: `[N]` bool, those that must use recorded routes; `by_sample` `[B]` of each sequence.
        free: `[N]` bool, real ones without recorded routes; None: there are none.
    """

    due: Tensor
    free: Tensor | None
    by_sample: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], layout: AnyLayout, records: Sequence[RouteRecord | None] = ()) -> DueTokens:
        """Due routes of sequences with `lengths` tokens; without `records`, all tokens have routes."""
        due_N, free_N = due_tokens(lengths, layout), free_tokens(records, layout)
        if free_N is not None:
            due_N = due_N & ~free_N
        return cls(due_N, free_N, due_by_sample(due_N, layout))
