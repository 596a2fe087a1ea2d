"""SGLang's `meta_info.routed_experts` decoded into a `RouteRecord`, once, at the edge.

Shape letters: T tokens, D decoder layers of the engine's payload, L MoE layers, K experts per token.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np

from routing.errors import RouteError
from routing.record import RouteRecord, expert_dtype, token_digest


def decode_payload(
    payload: str | bytes,
    *,
    tokens: np.ndarray,
    num_layers: int,
    layer_ids: Sequence[int],
    num_experts: int,
    top_k: int,
    start: int = 0,
) -> RouteRecord:
    """Decode base64 of little-endian int32 `[T-1-start, D, K]` and bind it to `tokens`.

    The payload has one column per decoder layer, dense ones included; only the columns named by `layer_ids` are kept.
    Ids are checked as int32 before they are narrowed, so a negative or oversized id cannot wrap into a legal one.

    Args:
        payload: the `routed_experts` field of one response.
        tokens: `[T]` ids of the whole sequence, prompt and output.
        num_layers: `D`, decoder layers of the served model.
        layer_ids: 0-based decoder layers that are MoE, ascending.
        num_experts: routed experts per layer.
        top_k: `K`, routed experts per token.
        start: first row that was asked for (request field `routed_experts_start_len`), as in `routing.groups.extend`.

    Returns:
        A validated record with the rows `start..T-2` and the digest of `tokens`.

    Raises:
        RouteError: `payload` (not base64, or a length that is no whole number of rows), `rows` (too few or too many rows),
            `layers`, `range`, `duplicate`.

    Source: SGLang 0.5.23, request field `return_routed_experts`.
    """
    wanted = tuple(int(layer) for layer in layer_ids)
    if not wanted or list(wanted) != sorted(set(wanted)) or wanted[0] < 0 or wanted[-1] >= num_layers:
        raise RouteError(
            "layers",
            "MoE layer ids do not fit the payload",
            got=wanted,
            expected=f"distinct ascending ids in 0..{num_layers - 1}",
        )
    rows_TDK = _rows(payload, num_layers, top_k)
    expected_rows = int(np.asarray(tokens).shape[0]) - 1 - start
    if rows_TDK.shape[0] != expected_rows:
        raise RouteError(
            "rows",
            "wrong number of route rows in the payload",
            got=rows_TDK.shape[0],
            expected=expected_rows,
            fix=f"One row per forwarded token is needed: request them from row {start} on (routed_experts_start_len={start}).",
        )
    routes_TLK = rows_TDK[:, wanted, :]
    outside = (routes_TLK < 0) | (routes_TLK >= num_experts)
    if outside.any():
        row, column, slot = np.argwhere(outside)[0]
        raise RouteError(
            "range",
            "expert id out of range",
            where=f"row {row}, layer {wanted[column]}",
            got=int(routes_TLK[row, column, slot]),
            expected=f"0..{num_experts - 1}",
        )
    record = RouteRecord(
        experts=np.ascontiguousarray(routes_TLK.astype(expert_dtype(num_experts))),
        layer_ids=wanted,
        num_experts=num_experts,
        token_digest=token_digest(tokens),
    )
    record.validate(expected_rows + 1)
    return record


def _rows(payload: str | bytes, num_layers: int, top_k: int) -> np.ndarray:
    """The payload as int32 `[rows, D, K]`, or a `RouteError`."""
    if not isinstance(payload, str | bytes):
        raise RouteError(
            "payload", "routes are missing from the response", got=type(payload).__name__, expected="a base64 string"
        )
    try:
        raw = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RouteError(
            "payload", f"routes are not valid base64: {error}", got=f"{len(payload)} characters"
        ) from error
    row_bytes = 4 * num_layers * top_k
    if len(raw) % row_bytes:
        raise RouteError(
            "payload",
            "routes do not divide into whole rows",
            got=f"{len(raw)} bytes",
            expected=f"a multiple of {row_bytes} ({num_layers} layers x {top_k} experts x 4)",
            fix="The payload was cut, or the served model has other layers or another top-k.",
        )
    return np.frombuffer(raw, dtype="<i4").reshape(-1, num_layers, top_k)
