"""SGLang's `meta_info.routed_experts` decoded into a `RouteRecord`, once, at the edge.

Shape letters: T tokens, D decoder layers of the engine's payload, L MoE layers, K experts per token.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from routing.errors import RouteError
from routing.record.arrays import checked_layers
from routing.record.record import RouteRecord, expert_dtype, token_digest

try:
    from pybase64 import b64decode  # several times as fast
except ImportError:
    from base64 import b64decode  # type: ignore[assignment]

PAYLOAD_DTYPE = "int32"
"""Type of the ids in a payload whose sender does not name one."""
_PART_BYTES = 1 << 20
_PAYLOADS = (str, bytes, memoryview)
PAYLOAD_BYTES = {"int32": 4, "uint16": 2, "uint8": 1}
"""Bytes of an id, by the types that a payload can have."""
_SENT = {name: (np.dtype(name).newbyteorder("<"), np.dtype(f"<u{size}")) for name, size in PAYLOAD_BYTES.items()}
"""By name: the little-endian type, and the unsigned one of that size."""


def decode_payload(
    payload: str | bytes | memoryview,
    *,
    tokens: np.ndarray,
    num_layers: int,
    layer_ids: Sequence[int],
    num_experts: int,
    top_k: int,
    start: int = 0,
    dtype: str = PAYLOAD_DTYPE,
) -> RouteRecord:
    """Decode base64 of little-endian `dtype` `[T-1-start, D, K]` and bind it to `tokens`.

    The payload has one column per decoder layer, dense ones included; only the columns named by `layer_ids` are kept.
    Ids are checked as they came before they are narrowed, so a negative or oversized id cannot wrap into a legal one.

    Args:
        payload: the `routed_experts` field of one response.
        tokens: `[T]` ids of the whole sequence, prompt and output.
        num_layers: `D`, decoder layers of the served model.
        layer_ids: 0-based decoder layers that are MoE, ascending.
        num_experts: routed experts per layer.
        top_k: `K`, routed experts per token.
        start: first row that was asked for (request field `routed_experts_start_len`), as in
            `routing.record.groups.extend`.
        dtype: int32, uint16 or uint8, as the response names it.

    Returns:
        A validated record with the rows `start..T-2` and the digest of `tokens`.

    Raises:
        RouteError: `payload` (not base64, or a length that is no whole number of rows), `rows` (too few or too many
            rows), `layers`, `dtype` (not one of the three, or too small for the model), `range`, `duplicate`.

    Source: SGLang 0.5.23, request field `return_routed_experts`.
    """
    layers, columns = _columns(tuple(layer_ids), num_layers)
    sent, unsigned = _payload_types(dtype, num_experts)
    row_bytes = num_layers * top_k * sent.itemsize
    num_rows, expected_rows = _num_rows(payload, row_bytes), len(tokens) - 1 - start
    if num_rows != expected_rows:
        raise RouteError(
            "rows",
            "wrong number of route rows in the payload",
            got=num_rows,
            expected=expected_rows,
            fix=(
                f"One row per forwarded token is needed: request them from row {start} on "
                f"(routed_experts_start_len={start})."
            ),
        )
    experts = np.empty((num_rows, len(layers), top_k), dtype=expert_dtype(num_experts))
    for first, flat in _parts(payload, num_rows, row_bytes):
        routes_TLK = flat.view(sent).reshape(-1, num_layers, top_k)[:, columns, :]
        # As an unsigned number, a negative id is above all others.
        if np.maximum.reduce(routes_TLK.view(unsigned), axis=None, initial=0) >= num_experts:
            row, column, slot = np.argwhere((routes_TLK < 0) | (routes_TLK >= num_experts))[0]
            raise RouteError(
                "range",
                "expert id out of range",
                where=f"row {first + row}, layer {layers[column]}",
                got=int(routes_TLK[row, column, slot]),
                expected=f"0..{num_experts - 1}",
            )
        experts[first : first + len(routes_TLK)] = routes_TLK
    record = RouteRecord(experts=experts, layer_ids=layers, num_experts=num_experts, token_digest=token_digest(tokens))
    record.validate(expected_rows + 1, in_range=True)
    return record


@lru_cache(maxsize=4)
def _columns(layer_ids: tuple[int, ...], num_layers: int) -> tuple[tuple[int, ...], slice | list[int]]:
    """The layers, checked, and their columns in a payload. Raises `RouteError` (`layers`)."""
    layers = checked_layers(layer_ids, num_layers)
    # Neighbouring columns are a view; others are a copy.
    neighbours = layers == tuple(range(layers[0], layers[-1] + 1))
    return layers, slice(layers[0], layers[-1] + 1) if neighbours else list(layers)


def _payload_types(name: str, num_experts: int) -> tuple[np.dtype, np.dtype]:
    """Those of `_SENT`. Raises `RouteError` for one that no engine sends, or that cannot name every expert."""
    if 256 ** PAYLOAD_BYTES.get(name, 0) < num_experts:
        raise RouteError(
            "dtype",
            "routes are sent in a type that is not known or too small for the model",
            got=f"{name} for {num_experts} experts",
            expected=f"one of {', '.join(PAYLOAD_BYTES)} that holds {num_experts - 1}",
        )
    return _SENT[name]


def _num_rows(payload: str | bytes | memoryview, row_bytes: int) -> int:
    """Rows that the length of the payload stands for, or a `RouteError`; nothing is decoded."""
    if not isinstance(payload, _PAYLOADS):
        raise RouteError(
            "payload", "routes are missing from the response", got=type(payload).__name__, expected="a base64 string"
        )
    if len(payload) % 4:
        raise _not_base64(payload, "its length is no multiple of 4")
    end = payload[-2:] if isinstance(payload, str) else bytes(payload[-2:]).decode("latin-1")
    num_bytes = len(payload) // 4 * 3 - (len(end) - len(end.rstrip("=")))
    if num_bytes % row_bytes:
        raise RouteError(
            "payload",
            "routes do not divide into whole rows",
            got=f"{num_bytes} bytes",
            expected=f"a multiple of {row_bytes} (layers x experts per token x bytes of an id)",
            fix="The payload was cut, or the served model has other layers, another top-k or another type of ids.",
        )
    return num_bytes // row_bytes


def _parts(payload: str | bytes | memoryview, num_rows: int, row_bytes: int) -> Iterator[tuple[int, np.ndarray]]:
    """The payload's bytes as uint8, whole rows at a time with the number of the first. Raises `RouteError`.

    In parts, because the whole of a long sequence takes several times the memory of its record.
    """
    # Three rows are a whole number of base64's groups of three bytes.
    rows = 3 * max(1, _PART_BYTES // (3 * row_bytes))
    step = rows * row_bytes // 3 * 4
    for start in range(0, len(payload), step):
        try:
            raw = b64decode(payload[start : start + step], validate=True)
        except (binascii.Error, ValueError) as error:
            raise _not_base64(payload, str(error)) from error
        first = start // step * rows
        if len(raw) != min(rows, num_rows - first) * row_bytes:
            raise _not_base64(payload, "it ends before its last character")
        yield first, np.frombuffer(raw, dtype=np.uint8)


def _not_base64(payload: str | bytes | memoryview, why: str) -> RouteError:
    return RouteError("payload", f"routes are not valid base64: {why}", got=f"{len(payload)} characters")
