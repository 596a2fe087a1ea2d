"""The first cut of the records: the routes that the routers of a rank are given, by the layout that cut its tokens.

Shape letters: B sequences, S rows of all records, N local tokens in router order, P places of the whole micro-batch, L
MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from routing.errors import RouteError
from routing.layout.packed import AnyLayout
from routing.record.record import RouteRecord, expert_dtype
from routing.record.sources import layer_columns


def stacked_routes(
    records: Sequence[RouteRecord | None], layer_ids: Sequence[int], num_experts: int, top_k: int
) -> np.ndarray:
    """`[S, L, K]`: the rows of all records, one after the other. Raises as `layer_columns` does."""
    layers, dtype = tuple(layer_ids), expert_dtype(num_experts)
    parts = [np.zeros((0, len(layers), top_k), dtype)]
    for record in records:
        if record is None:
            continue
        experts = record.experts
        is_whole = (
            record.layer_ids == layers
            and record.num_experts == num_experts
            and experts.shape[1:] == (len(layers), top_k)
            and experts.dtype == dtype
        )
        parts.append(experts if is_whole else experts[:, layer_columns(record, layers, num_experts, top_k)])
    # One copy for all rows: one for each would cost more than what it copies.
    return np.concatenate(parts)


def rows_of_records(records: Sequence[RouteRecord | None]) -> np.ndarray:
    """`[B]` int64 rows of each record; 0 where there is none."""
    return np.array([0 if record is None else len(record.experts) for record in records], np.int64)


def padding_routes(num_tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """`[num_tokens, K]` int64 legal routes for padding: distinct within a row, spread evenly over experts.

    Never counted, never trained.
    """
    return np.arange(num_tokens * top_k).reshape(num_tokens, top_k) % num_experts


def first_cut(routes_SLK: np.ndarray, rows_B: np.ndarray, layout: AnyLayout, num_experts: int) -> np.ndarray:
    """`[L, N, K]`: the routes of `stacked_routes` in router order, `rows_B` of them for each row of the micro-batch.

    Places without a route have `padding_routes`. Raises `RouteError` (`rows`, `range`).
    """
    if len(rows_B) != layout.batch:
        raise RouteError("rows", "wrong number of route records for the layout", got=len(rows_B), expected=layout.batch)
    room_B = np.array([layout.room(row) for row in range(layout.batch)])
    if (rows_B > room_B).any():
        row = int(np.argmax(rows_B > room_B))
        raise RouteError(
            "rows",
            "a record is longer than the micro-batch",
            where=f"row {row}",
            got=int(rows_B[row]),
            expected=f"at most {room_B[row]}",
        )
    # A pipeline chunk may have dense layers only.
    if routes_SLK.size and int(routes_SLK.max()) >= num_experts:
        raise RouteError("range", "expert id out of range", got=int(routes_SLK.max()), expected=f"0..{num_experts - 1}")
    routes_PLK = routes_SLK
    if len(routes_SLK) < layout.num_places:
        # The rows of a record follow each other from the first place of its row on.
        before_B = np.cumsum(rows_B) - rows_B
        places_S = np.repeat(np.asarray(layout.starts) - before_B, rows_B) + np.arange(len(routes_SLK))
        routes_PLK = np.empty((layout.num_places, *routes_SLK.shape[1:]), routes_SLK.dtype)
        routes_PLK[:] = padding_routes(layout.num_places, num_experts, routes_SLK.shape[2])[:, None]
        routes_PLK[places_S] = routes_SLK
    return layers_first(routes_PLK.take(layout.router_index().numpy(), axis=0))


def layers_first(routes_NLK: np.ndarray) -> np.ndarray:
    """`[L, N, K]`, a copy."""
    tokens, layers, top_k = routes_NLK.shape
    # The K ids of a token in a layer stay together: moved as one, they take a fraction of the time.
    together_NL = routes_NLK.view(np.dtype((np.void, top_k * routes_NLK.itemsize)))[..., 0]
    return np.ascontiguousarray(together_NL.T).view(routes_NLK.dtype).reshape(layers, tokens, top_k)


def by_layer(routes_LNK: np.ndarray, layer_ids: Sequence[int], device: torch.device | None = None) -> dict[int, Tensor]:
    """Layer id -> `[N, K]` int64 on `device`."""
    all_layers = torch.from_numpy(routes_LNK.astype(np.int64)).to(device, non_blocking=True)
    return dict(zip(layer_ids, all_layers.unbind(0), strict=True))
