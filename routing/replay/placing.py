"""Routes of records at the places of their tokens, for rows of any layout and cut: twice, by different code.

Shape letters: B rows, R columns, N = B * R places in batch order, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from routing.errors import RouteError
from routing.layout.columns import Columns
from routing.layout.rows import Rows
from routing.record.record import RouteRecord
from routing.record.sources import layer_columns


def placed_routes(
    records: Sequence[RouteRecord | None],
    rows: Rows,
    layer_ids: Sequence[int],
    num_experts: int,
    top_k: int,
    columns: Columns | None = None,
) -> dict[int, Tensor]:
    """Layer id -> `[N, K]` int64, zeros where no route is known (padding, last tokens); of the columns alone, if given.

    Args:
        records: one for each sequence, already checked by `routing.record.sources.check_rows`; None where it has no
            tokens.
        rows: where the sequences lie.
        layer_ids: the wanted layers.
        num_experts: of the model.
        top_k: of the model.
        columns: this rank's; None: all of them.

    Raises:
        RouteError: `layers`, `shape`, `dtype`, `range`.
    """
    by_sequence = np.split(rows.places().numpy(), np.cumsum(rows.lengths)[:-1])
    routes_NLK = np.zeros((rows.shape[0] * rows.shape[1], len(layer_ids), top_k), dtype=np.uint16)
    for places, record in zip(by_sequence, records, strict=True):
        if record is not None:
            columns_of_layers = layer_columns(record, layer_ids, num_experts, top_k)
            routes_NLK[places[: record.num_rows]] = record.experts[:, columns_of_layers]
    if routes_NLK.size and int(routes_NLK.max()) >= num_experts:
        raise RouteError("range", "expert id out of range", got=int(routes_NLK.max()), expected=f"0..{num_experts - 1}")
    local_NLK = torch.from_numpy(routes_NLK.astype(np.int64))
    local_NLK = local_NLK if columns is None else columns.cut_places(local_NLK)
    routes_LNK = local_NLK.transpose(0, 1).contiguous()
    return dict(zip(layer_ids, routes_LNK.unbind(0), strict=True))


def sliced_routes(
    records: Sequence[RouteRecord | None],
    rows: Rows,
    layer_ids: Sequence[int],
    num_experts: int,
    top_k: int,
    columns: Columns | None = None,
) -> dict[int, Tensor]:
    """The same, cut a second time by plain slices: what the experts must be given."""
    by_layer = {layer: torch.zeros(rows.shape[0] * rows.shape[1], top_k, dtype=torch.int64) for layer in layer_ids}
    for (start, _), record in zip(rows.spans, records, strict=True):
        if record is None:
            continue
        for layer, column in zip(layer_ids, layer_columns(record, layer_ids, num_experts, top_k), strict=True):
            ids = torch.from_numpy(record.experts[:, column].astype(np.int64))
            by_layer[layer][start : start + record.num_rows] = ids
    return by_layer if columns is None else {layer: columns.keep_owned(ids) for layer, ids in by_layer.items()}


def uncovered(records: Sequence[RouteRecord | None], rows: Rows) -> Tensor | None:
    """`[N]` bool: tokens without routes in their record. None: there are none."""
    free_N = torch.zeros(rows.shape[0] * rows.shape[1], dtype=torch.bool)
    for (start, _), record in zip(rows.spans, records, strict=True):
        if record is not None and record.covered is not None:
            free_N[start : start + record.num_rows] = torch.from_numpy(~record.covered)
    return free_N if bool(free_N.any()) else None
