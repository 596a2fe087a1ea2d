"""Records that share rows: the samples of one prompt, and the turns of one conversation. Shared rows are stored once.

Nothing is assumed about the shared rows: leading rows that are equal in every id are found by comparing. So decoding
returns exactly the encoded records, even if the engine routed a prompt differently the second time.

Bytes of a group, little-endian:

    magic "MTRG" | version u8 | members u16 | per member: base u16, shared rows u32, length u64 | members |
    checksum 16 bytes

Member `i` is `routing.encode` of its own rows after the `shared` leading rows of member `base < i`.

Shape letters: T tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from routing.errors import RouteError
from routing.record.codec import CHECKSUM_BYTES, checksum, decode, encode
from routing.record.record import RouteRecord

VERSION = 1
_PART = 1 << 10
_MAGIC = b"MTRG"
_HEAD, _MEMBER = struct.Struct("<4sBH"), struct.Struct("<HIQ")


def shared_rows(a: RouteRecord, b: RouteRecord) -> int:
    """Number of equal leading rows of two records of one model: the same ids in the same order, known in both or
    neither.
    """
    if _model(a) != _model(b):
        return 0
    rows, known_a, known_b = min(a.num_rows, b.num_rows), a.coverage(), b.coverage()
    # In parts: answers to a prompt differ early, and the rest of a long one is then never read.
    for start in range(0, rows, _PART):
        part = slice(start, min(start + _PART, rows))
        differs = (a.experts[part] != b.experts[part]).any((1, 2)) | (known_a[part] != known_b[part])
        if differs.any():
            return start + int(differs.argmax())
    return rows


def encode_group(records: Sequence[RouteRecord], order: Literal["engine", "set"] = "engine") -> bytes:
    """Records, e.g. of the samples of one prompt, as bytes that hold shared leading rows once.

    Args:
        records: 1 to 65,535 legal records; only records of one model share anything.
        order: as for `routing.encode`. With `set`, rows are compared as sets.

    Raises:
        RouteError: a record is not legal or cannot be encoded.
    """
    if not 1 <= len(records) < 1 << 16:
        raise RouteError("payload", "wrong number of records in a group", got=len(records), expected="1..65535")
    kept = [_ascending(record) if order == "set" else record for record in records]
    bases: list[tuple[int, int]] = []
    for index, record in enumerate(kept):
        # The longest prefix among earlier members: samples may branch off each other, not only off the first.
        shared = [shared_rows(record, earlier) for earlier in kept[:index]]
        base = int(np.argmax(shared)) if shared else 0
        bases.append((base, shared[base] if shared else 0))
    parts = [encode(_tail(record, rows), order) for record, (_, rows) in zip(kept, bases, strict=True)]
    head = _HEAD.pack(_MAGIC, VERSION, len(kept))
    table = [_MEMBER.pack(base, rows, len(part)) for (base, rows), part in zip(bases, parts, strict=True)]
    content = [head, *table, *parts]
    return b"".join([*content, checksum(*content)])


def decode_group(data: bytes | memoryview, num_rows: Sequence[int] | None = None) -> list[RouteRecord]:
    """The records that `encode_group` wrote, in order.

    Args:
        data: the bytes.
        num_rows: T - 1 of each member if known: others are refused before memory is taken for them, as by
            `routing.decode`.

    Raises:
        RouteError: `payload`, for bytes that were changed in any way, or a group of another number of records or rows.
    """
    content = _content(data)
    _, _, members = _HEAD.unpack_from(content)
    start = _HEAD.size + members * _MEMBER.size
    if len(content) < start:
        raise _damaged("the table of members is cut")
    if num_rows is not None and len(num_rows) != members:
        raise RouteError("payload", "a group of another number of records", got=members, expected=len(num_rows))
    records: list[RouteRecord] = []
    for index in range(members):
        base, rows, length = _MEMBER.unpack_from(content, _HEAD.size + index * _MEMBER.size)
        if length > len(content) - start or (rows and base >= index):
            raise _damaged(f"member {index} lies outside the group")
        tail = decode(content[start : start + length], None if num_rows is None else num_rows[index] - rows)
        start += length
        records.append(_joined(records[base], rows, tail) if rows else tail)
    if start != len(content):
        raise _damaged("bytes behind the last member")
    return records


def extend(earlier: RouteRecord, later: RouteRecord, start: int) -> RouteRecord:
    """Join an earlier turn's record and a later answer whose rows begin at token `start`.

    `start` is SGLang's `routed_experts_start_len`.

    Args:
        earlier: covers at least the first `start` rows.
        later: rows `start, start + 1, ...`; its token digest covers the whole sequence.

    Raises:
        RouteError: `rows` (a gap between the two), `layers` (another model).
    """
    if earlier.indexer is not None or later.indexer is not None:
        raise RouteError(
            "positions",
            "positions of a later turn cannot be appended",
            got="a record with positions",
            expected="one answer",
            fix="Record the positions of the whole sequence in one pass.",
        )
    if not 0 <= start <= earlier.num_rows:
        raise RouteError(
            "rows",
            "rows are missing between two turns",
            got=f"rows from {start}",
            expected=f"at most {earlier.num_rows}",
        )
    return _joined(earlier, start, later)


def _joined(base: RouteRecord, rows: int, tail: RouteRecord) -> RouteRecord:
    if _model(base) != _model(tail) or rows > base.num_rows:
        raise RouteError(
            "layers",
            "records that do not fit cannot share rows",
            got=(_model(tail), rows),
            expected=(_model(base), f"at most {base.num_rows} rows"),
        )
    covered = np.concatenate([base.coverage()[:rows], tail.coverage()])
    joined = replace(
        tail,
        experts=np.concatenate([base.experts[:rows], tail.experts]),
        covered=None if covered.all() else covered,
    )
    joined.validate()
    return joined


def _tail(record: RouteRecord, rows: int) -> RouteRecord:
    covered = None if record.covered is None else record.covered[rows:]
    return replace(record, experts=record.experts[rows:], covered=None if covered is None or covered.all() else covered)


def _ascending(record: RouteRecord) -> RouteRecord:
    return replace(record, experts=np.sort(record.experts, axis=-1), order="set")


def _model(record: RouteRecord) -> tuple[object, ...]:
    return record.layer_ids, record.num_experts, record.top_k, record.order


def _content(data: bytes | memoryview) -> memoryview:
    view = memoryview(data)
    content = view[:-CHECKSUM_BYTES]
    if len(view) < _HEAD.size + CHECKSUM_BYTES or content[:4] != _MAGIC:
        raise _damaged(f"not {_MAGIC!r}")
    if content[4] != VERSION:
        raise RouteError("payload", "routes are encoded in another version", got=content[4], expected=VERSION)
    if checksum(content) != bytes(view[-CHECKSUM_BYTES:]):
        raise _damaged("wrong checksum")
    return content


def _damaged(why: str) -> RouteError:
    return RouteError(
        "payload", f"encoded routes are damaged: {why}", expected="unchanged bytes", fix="Read or transfer them again."
    )
