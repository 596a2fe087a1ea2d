"""vLLM's `routed_experts` decoded into a `RouteRecord`, once, at the edge.

Source: vLLM, `--enable-return-routed-experts`: `choices[i].routed_experts` is base64 of the bytes of an `.npy` file,
with the shape (tokens - 1, decoder layers, experts per token) and ids as uint8, uint16 or int32.

Shape letters: T tokens, P tokens of the prompt, D layers of the payload, L MoE layers, K experts per token.
"""

from __future__ import annotations

import ast
import base64
import binascii
import math
import re
from collections.abc import Sequence

import numpy as np

from routing.errors import RouteError
from routing.record.arrays import checked_layers, moe_columns
from routing.record.record import RouteRecord, token_digest

PAYLOAD_TYPES = ("uint8", "uint16", "int32")
"""Types of ids that vLLM sends. The payload names its own."""
_MAGIC = b"\x93NUMPY"
_DESCR = re.compile(r"[<>|=]?(?:u1|u2|i4)")
_MAX_HEADER = 1024


def decode_payload(
    payload: str | bytes | None,
    *,
    tokens: np.ndarray,
    num_layers: int,
    layer_ids: Sequence[int],
    num_experts: int,
    top_k: int,
    start: int = 0,
    prompt_payload: str | bytes | None = None,
    num_prompt_tokens: int | None = None,
) -> RouteRecord:
    """Decode the routes of one choice and bind them to `tokens`.

    Ids are checked as they came before they are narrowed, so a negative or oversized id cannot wrap into a legal one.

    Args:
        payload: `choices[i].routed_experts`. With a `prompt_payload` it has the rows behind the prompt alone, and may
            be None for an answer of one token, which is never forwarded.
        tokens: `[T]` ids of the whole sequence, prompt and output.
        num_layers: `D`, layers in the payload: the model's decoder layers, dense ones included.
        layer_ids: 0-based decoder layers that are MoE, ascending. Dense columns are not looked at.
        num_experts: routed experts per layer.
        top_k: `K`, routed experts per token.
        start: first row that was asked for (request field `routed_experts_prompt_start`), as in
            `routing.record.groups.extend`.
        prompt_payload: `prompt_routed_experts` of the response, from versions that send the P rows of the prompt apart.
        num_prompt_tokens: `P`; needed with a `prompt_payload`.

    Returns:
        A validated record with the rows `start..T-2` and the digest of `tokens`.

    Raises:
        RouteError: `payload` (missing, not base64, no `.npy` file, damaged, or with bytes behind it), `dtype` (not one
            that vLLM sends), `shape`, `rows` (too few or too many), `layers`, `range`,
            `duplicate` (as of rows that the server never filled, which are zeros).
    """
    layers = checked_layers(layer_ids, num_layers)
    num_rows = int(np.asarray(tokens).shape[0]) - 1 - start
    if prompt_payload is None:
        parts = [(payload, num_rows)]
    else:
        if num_prompt_tokens is None or start:
            raise RouteError(
                "rows",
                "routes of the prompt that come apart need its length, and begin with its first token",
                got=f"num_prompt_tokens={num_prompt_tokens}, start={start}",
                expected="a number of tokens, and start=0",
            )
        # The prompt of an answer without tokens ends with a token that is not forwarded.
        num_first = min(num_prompt_tokens, num_rows)
        parts = [(prompt_payload, num_first), *([(payload, num_rows - num_first)] if num_rows > num_first else [])]
    decoded = [moe_columns(_array(part), rows, (num_layers, top_k), layers, num_experts) for part, rows in parts]
    record = RouteRecord(np.concatenate(decoded), layers, num_experts, token_digest(tokens))
    record.validate(num_rows + 1)
    return record


def _array(payload: str | bytes | None) -> np.ndarray:
    """The array of an `.npy` file in base64; nothing in it is executed."""
    if not isinstance(payload, str | bytes):
        raise RouteError(
            "payload",
            "routes are missing from the response",
            got=type(payload).__name__,
            expected="a base64 string",
            fix="Start the server with --enable-return-routed-experts. A request that was aborted has no routes.",
        )
    try:
        raw = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RouteError(
            "payload", f"routes are not valid base64: {error}", got=f"{len(payload)} characters"
        ) from error
    return _npy_array(raw)


def _npy_array(raw: bytes) -> np.ndarray:
    """The array of an `.npy` file. Its header is read strictly: numpy's own reader repairs some damage."""
    size_bytes = {1: 2, 2: 4, 3: 4}.get(raw[6] if len(raw) > 6 else 0)
    if not raw.startswith(_MAGIC) or size_bytes is None:
        raise RouteError("payload", "routes are no .npy file", got=raw[:8], expected=f"{_MAGIC!r} and a version")
    start = 8 + size_bytes
    end = start + int.from_bytes(raw[8:start], "little")
    try:
        header = ast.literal_eval(raw[start : min(end, start + _MAX_HEADER)].decode("ascii").strip())
        descr, shape, by_columns = header["descr"], header["shape"], header["fortran_order"]
        has_sizes = all(type(size) is int and size >= 0 for size in shape)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise RouteError("payload", f"the header of the routes is damaged: {error}", got=f"{len(raw)} bytes") from error
    if not isinstance(descr, str) or not isinstance(shape, tuple) or not has_sizes or type(by_columns) is not bool:
        raise RouteError("payload", "the header of the routes is damaged", got=header)
    named = _DESCR.fullmatch(descr)
    if named is None:
        raise RouteError(
            "dtype",
            "routes are sent in a type that is not known",
            got=descr,
            expected=f"one of {', '.join(PAYLOAD_TYPES)}",
        )
    dtype = np.dtype(descr)
    if len(raw) - end != math.prod(shape) * dtype.itemsize:
        raise RouteError(
            "payload",
            "the routes have another length than their header says",
            got=f"{len(raw) - end} bytes",
            expected=f"{math.prod(shape) * dtype.itemsize} for {shape} of {dtype.name}",
        )
    return np.frombuffer(raw, dtype, offset=end).reshape(shape, order="F" if by_columns else "C")
