"""Records to bytes and back: self-describing, versioned, checksummed.

Layout of the bytes, little-endian:

    magic "MTRR" | version u8 | codec u8 | order u8 | digest length u8 | E u32 | T-1 u32 | L u32 | K u32
    | layer ids L x u32 | token digest 0 or 16 bytes | coverage 0 or ceil((T-1)/8) bytes
    | 0 or length u64 and positions (`IndexerRecord.encode`) | body
    | checksum 16 bytes (blake2b of everything before it)

Bit 4 of the codec byte says that some rows have no routes; then one bit per row, most significant first, tells which
have. Bit 5 says that there are positions.

Body of codec `raw`: ids as uint8 or uint16 (`expert_dtype`). Body of codec `set`: one rank per row and layer,
bit-packed (see `routing.record.combinations`).

Shape letters: T tokens, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Literal

import numpy as np

from routing.errors import RouteError
from routing.indexer.record import IndexerRecord
from routing.record import combinations
from routing.record.record import RouteRecord, expert_dtype

MAGIC, VERSION = b"MTRR", 1
_HEADER = struct.Struct("<4sBBBBIIII")
CHECKSUM_BYTES, _DIGEST_BYTES = 16, 16
MAX_TOP_K = 256
"""Larger K are refused: no model has them, and their sets could be far larger than their bytes."""
_RAW, _SET, _PARTIAL, _POSITIONS = 0, 1, 0x10, 0x20
_LENGTH = struct.Struct("<Q")
_ORDERS = ("engine", "set")


def encode(record: RouteRecord, order: Literal["engine", "set"] = "engine") -> bytes:
    """A validated record as bytes.

    Args:
        record: any legal record.
        order: `engine` keeps ids as they are, one or two bytes each. `set` keeps only which experts were chosen, in
            `ceil(log2 C(E, K))` bits per row and layer; decoding gives ascending ids and a record whose `order` says
            so.

    Raises:
        RouteError: the record is not legal, or `set` cannot rank its expert sets (more than 2^126 of them; use
            `engine`).
    """
    record.validate()
    if record.token_digest is not None and len(record.token_digest) != _DIGEST_BYTES:
        raise RouteError(
            "digest", "token digest has the wrong size", got=len(record.token_digest), expected=_DIGEST_BYTES
        )
    body: bytes | memoryview
    if order == "engine":
        stored = np.ascontiguousarray(record.experts, dtype=_stored(record.num_experts))
        codec, body, kept = _RAW, stored.reshape(-1).view(np.uint8).data, record.order
    elif order == "set":
        flat = np.sort(record.experts.reshape(-1, record.top_k), axis=1)
        codec, body, kept = _SET, combinations.pack(flat, record.num_experts), "set"
    else:
        raise RouteError("payload", "unknown order", got=order, expected="engine or set")
    rows, layers, top_k = record.experts.shape
    digest = record.token_digest or b""
    coverage = b"" if record.covered is None else np.packbits(record.covered).tobytes()
    if record.covered is not None:
        codec |= _PARTIAL
    positions = b""
    if record.indexer is not None:
        codec |= _POSITIONS
        encoded = record.indexer.encode()
        positions = _LENGTH.pack(len(encoded)) + encoded
    header = _HEADER.pack(
        MAGIC, VERSION, codec, _ORDERS.index(kept), len(digest), record.num_experts, rows, layers, top_k
    )
    parts = [header, np.asarray(record.layer_ids, dtype="<u4").tobytes(), digest, coverage, positions, body]
    return b"".join([*parts, checksum(*parts)])


def decode(data: bytes | memoryview, num_rows: int | None = None) -> RouteRecord:
    """The record that `encode` wrote. Any change of the bytes is refused.

    Args:
        data: the bytes.
        num_rows: T - 1 if known: a record of another length is refused before memory is taken for it. Where nearly
            every expert is chosen, sets take few bits, and a small payload may claim a large record.

    Raises:
        RouteError: `payload` (not ours, another version, cut, extended, or changed), or the reason of the invariant a
            record violates.
    """
    content, stored_checksum = memoryview(data)[:-CHECKSUM_BYTES], bytes(data[-CHECKSUM_BYTES:])
    if len(data) < _HEADER.size + CHECKSUM_BYTES or content[: len(MAGIC)] != MAGIC:
        raise RouteError(
            "payload",
            "these bytes are not encoded routes",
            got=f"{len(data)} bytes starting {bytes(data[:4])!r}",
            expected=f"{MAGIC!r}",
        )
    if content[4] != VERSION:
        raise RouteError("payload", "routes are encoded in another version", got=content[4], expected=VERSION)
    if checksum(content) != stored_checksum:
        raise RouteError(
            "payload",
            "encoded routes are damaged",
            got="wrong checksum",
            expected="unchanged bytes",
            fix="Read or transfer them again.",
        )
    _, _, codec, order, digest_bytes, num_experts, rows, layers, top_k = _HEADER.unpack_from(content)
    if num_rows is not None and rows != num_rows:
        raise RouteError("payload", "encoded routes are of another number of tokens", got=rows, expected=num_rows)
    partial, has_positions, codec = bool(codec & _PARTIAL), bool(codec & _POSITIONS), codec & ~(_PARTIAL | _POSITIONS)
    if (
        codec not in (_RAW, _SET)
        or order >= len(_ORDERS)
        or digest_bytes not in (0, _DIGEST_BYTES)
        or not 1 <= top_k <= min(num_experts, MAX_TOP_K)
        or num_experts > 1 << 16
    ):
        raise RouteError(
            "payload",
            "the header of encoded routes makes no sense",
            got=(codec, order, digest_bytes, num_experts, top_k),
        )
    start = _HEADER.size + 4 * layers
    coverage_end = start + digest_bytes + ((rows + 7) // 8 if partial else 0)
    indexer, body_start = _positions(content, coverage_end) if has_positions else (None, coverage_end)
    body = content[body_start:]
    cells = rows * layers
    size = (
        cells * top_k * expert_dtype(num_experts).itemsize
        if codec == _RAW
        else combinations.packed_bytes(cells, num_experts, top_k)
    )
    if len(content) < body_start or len(body) != size:
        raise RouteError("payload", "encoded routes have the wrong length", got=len(body), expected=size)
    layer_ids = tuple(np.frombuffer(content, dtype="<u4", count=layers, offset=_HEADER.size).tolist())
    if codec == _RAW:
        flat = np.frombuffer(body, dtype=_stored(num_experts)).astype(expert_dtype(num_experts))
    else:
        flat = combinations.unpack(body, cells, num_experts, top_k).astype(expert_dtype(num_experts))
    record = RouteRecord(
        experts=flat.reshape(rows, layers, top_k),
        layer_ids=layer_ids,
        num_experts=num_experts,
        token_digest=bytes(content[start : start + digest_bytes]) or None,
        order="engine" if order == 0 else "set",
        covered=_coverage(content[start + digest_bytes : coverage_end], rows) if partial else None,
        indexer=indexer,
    )
    record.validate()
    return record


def _coverage(packed: memoryview, rows: int) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8)).astype(bool)
    if bits[rows:].any() or bits[:rows].all():
        raise RouteError("payload", "the coverage of encoded routes makes no sense", expected="a row without routes")
    return bits[:rows]


def _positions(content: memoryview, start: int) -> tuple[IndexerRecord, int]:
    """The positions that begin at `start`, and where they end."""
    end = start + _LENGTH.size
    if len(content) >= end:
        start, end = end, end + _LENGTH.unpack_from(content, start)[0]
    if len(content) < end:
        raise RouteError("payload", "encoded routes have the wrong length", got=len(content), expected=end)
    return IndexerRecord.decode(bytes(content[start:end])), end


def _stored(num_experts: int) -> np.dtype:
    return expert_dtype(num_experts).newbyteorder("<")


def checksum(*parts: bytes | memoryview) -> bytes:
    """16 bytes that change with any change of the joined `parts` (blake2b)."""
    hasher = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    for part in parts:
        hasher.update(part)
    return hasher.digest()
