"""Arrays of expert ids with a column for every decoder layer, as engines and trainers hold them, made into records.

Shape letters: T tokens, D layers of the array, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from routing.errors import RouteError
from routing.record.record import RouteRecord, expert_dtype, token_digest


def record_of(
    routes_TDK: np.ndarray,
    *,
    tokens: np.ndarray,
    num_layers: int,
    layer_ids: Sequence[int],
    num_experts: int,
    top_k: int,
    start: int = 0,
) -> RouteRecord:
    """A validated record of the rows `start..T-2`, bound to `tokens` `[T]`.

    Args:
        routes_TDK: `[T-1-start, D, K]` integers.
        tokens: ids of the whole sequence.
        num_layers: `D`, the model's decoder layers, dense ones included.
        layer_ids: 0-based decoder layers that are MoE, ascending. Other columns are not looked at.
        num_experts: routed experts per layer.
        top_k: `K`.
        start: sequence row of the array's first.

    Raises:
        RouteError: `dtype` (not integers), `shape`, `rows` (too few or too many), `layers`, `range`, `duplicate` (as of
            rows that were never filled, which are zeros).
    """
    num_rows = int(np.asarray(tokens).shape[0]) - 1 - start
    layers = checked_layers(layer_ids, num_layers)
    experts = moe_columns(routes_TDK, num_rows, (num_layers, top_k), layers, num_experts)
    record = RouteRecord(experts, layers, num_experts, token_digest(tokens))
    record.validate(num_rows + 1)
    return record


def moe_columns(
    routes_TDK: np.ndarray, num_rows: int, of_row: tuple[int, int], layers: Sequence[int], num_experts: int
) -> np.ndarray:
    """The MoE columns `[rows, L, K]` in the record's type.

    Ids are checked as they came before they are narrowed, so a negative or oversized id cannot wrap into a legal one.
    `of_row` is `(D, K)`. Raises as `record_of` does.
    """
    if routes_TDK.dtype.kind not in "iu":
        raise RouteError("dtype", "expert ids are no integers", got=routes_TDK.dtype, expected="integers")
    if routes_TDK.ndim != 3 or routes_TDK.shape[1:] != of_row:
        raise RouteError(
            "shape",
            "routes have other layers or another top-k",
            got=routes_TDK.shape,
            expected=f"(rows, {of_row[0]}, {of_row[1]})",
            fix="num_layers counts the decoder layers of the array, dense ones included.",
        )
    if len(routes_TDK) != num_rows:
        raise RouteError(
            "rows",
            "wrong number of route rows",
            got=len(routes_TDK),
            expected=num_rows,
            fix="One row per forwarded token is needed, all but the last of the sequence, from row `start` on.",
        )
    routes_TLK = routes_TDK[:, list(layers)]
    outside = (routes_TLK < 0) | (routes_TLK >= num_experts)
    if outside.any():
        row, column, slot = np.argwhere(outside)[0]
        raise RouteError(
            "range",
            "expert id out of range",
            where=f"row {row}, layer {layers[column]}",
            got=int(routes_TLK[row, column, slot]),
            expected=f"0..{num_experts - 1}",
        )
    return routes_TLK.astype(expert_dtype(num_experts))


def checked_layers(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers as a tuple. Raises `RouteError` (`layers`)."""
    layers = tuple(int(layer) for layer in layer_ids)
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
        raise RouteError(
            "layers",
            "MoE layer ids do not fit the routes",
            got=layers,
            expected=f"distinct ascending ids in 0..{num_layers - 1}",
        )
    return layers
