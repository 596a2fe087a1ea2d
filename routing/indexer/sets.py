"""Sets of K earlier positions of each token as bits, near their limit of `log2 C(n, K)`.

Row `r` of a sequence sees `n = r + 1` positions. Up to K of them are all chosen, and take no bits. Of the others the
smaller side is written, the chosen ones or those left out: `m = min(K, n - K)` of them. Their gaps are Rice codes (Rice
and Plaunt 1971): a gap less 1 divided by `2^b` in unary, and the `b` bits of the remainder, with the `b` that fits gaps
of this mean. So a set takes `m (b + 1) + (n - m) / 2^b` bits at most, whatever it is.

A part of rows is the number of its bytes in unary as uint32, those bytes, and the remainders, which begin on a byte.

Shape letters: M rows with more than K positions, K positions of a row, C columns of a part, S positions written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from routing.errors import RouteError

_GOLDEN = 63073
"""Twice the log of the golden ratio, in units of 2^-16: a further bit pays once half of the gaps reach `2^b`.

In whole numbers, so that every machine takes the same `b`.
"""
_POSITIONS, _CELLS = 1 << 18, 1 << 24
_LENGTH = struct.Struct("<I")


def pack(sets_MK: np.ndarray) -> bytes:
    """Ascending positions `[M, K]` of rows K, K + 1, ... as bytes; each below `r + 1`."""
    rows, top_k = sets_MK.shape
    return b"".join(_pack_part(sets_MK[part], part.start + top_k) for part in _parts(rows, top_k))


def unpack(data: bytes, rows: int, top_k: int) -> np.ndarray:
    """Inverse of `pack`: `[M, K]` int32. Raises `RouteError` (`payload`) for bytes that are no such sets."""
    parts, start = [np.empty((0, top_k), np.int32)], 0
    for part in _parts(rows, top_k):
        part_sets, start = _unpack_part(data, start, part.stop - part.start, part.start + top_k, top_k)
        parts.append(part_sets)
    if start != len(data):
        raise _damaged(f"{len(data) - start} bytes too many")
    return np.concatenate(parts)


def bound_bits(columns: int, top_k: int) -> float:
    """Bits that a set of `top_k` of `columns` positions takes at most."""
    written = min(top_k, columns - top_k)
    b = int(_remainder_bits(np.array([columns]), np.array([written]))[0])
    return written * (b + 1) + (columns - written) / (1 << b)


def _parts(rows: int, top_k: int) -> Iterator[slice]:
    step = max(1, min(_POSITIONS // top_k, _CELLS // (rows + top_k)))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _shape(rows: int, first: int, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns, written positions and remainder bits of each row of a part that begins with row `first`."""
    columns = first + 1 + np.arange(rows)
    written = np.minimum(top_k, columns - top_k)
    return columns, written, _remainder_bits(columns, written)


def _remainder_bits(columns: np.ndarray, written: np.ndarray) -> np.ndarray:
    scaled = (2 * columns - written) * _GOLDEN // (written << 17)
    bits: np.ndarray = np.frexp(np.maximum(scaled, 1))[1].astype(np.int64) - 1
    return bits


def _side(sets_MK: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """`[rows, C]` bool: the smaller side of each row."""
    side = np.zeros((len(sets_MK), int(columns[-1])), bool)
    np.put_along_axis(side, sets_MK.astype(np.int64), True, axis=1)
    return _flip(side, columns, sets_MK.shape[1])


def _flip(side: np.ndarray, columns: np.ndarray, top_k: int) -> np.ndarray:
    """The other side of rows whose smaller one has the positions left out."""
    flipped = columns < 2 * top_k
    side[flipped] = ~side[flipped] & (np.arange(side.shape[1]) < columns[flipped, None])
    return side


def _pack_part(sets_MK: np.ndarray, first: int) -> bytes:
    columns, written, b_M = _shape(len(sets_MK), first, sets_MK.shape[1])
    row_S, place_S = np.nonzero(_side(sets_MK, columns))
    before_S = np.concatenate([[-1], place_S[:-1]])
    before_S[np.cumsum(written) - written] = -1
    gap_S, b_S = place_S - before_S - 1, b_M[row_S]
    high_S = gap_S >> b_S
    unary = np.zeros(int(high_S.sum()) + len(high_S), np.uint8)
    unary[np.cumsum(high_S + 1) - 1] = 1
    low = np.concatenate([np.zeros(0, np.uint8), *(_bits(gap_S[b_S == b], int(b)) for b in np.unique(b_M))])
    head = np.packbits(unary).tobytes()
    return _LENGTH.pack(len(head)) + head + np.packbits(low).tobytes()


def _unpack_part(data: bytes, start: int, rows: int, first: int, top_k: int) -> tuple[np.ndarray, int]:
    columns, written, b_M = _shape(rows, first, top_k)
    if len(data) < start + _LENGTH.size:
        raise _damaged("cut")
    (size,) = _LENGTH.unpack_from(data, start)
    start += _LENGTH.size
    total, low_bits = int(written.sum()), int((written * b_M).sum())
    end = start + size + (low_bits + 7) // 8
    if len(data) < end:
        raise _damaged("cut")
    ones = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8, size, start)))
    low = np.unpackbits(np.frombuffer(data, np.uint8, end - start - size, start + size))
    if len(ones) != total or (total and size != int(ones[-1]) // 8 + 1) or low[low_bits:].any():
        raise _damaged("another number of positions")
    gap_S, b_S = np.diff(ones, prepend=-1) - 1, np.repeat(b_M, written)
    gap_S <<= b_S
    taken = 0
    for b in np.unique(b_M).tolist():
        count = int(written[b_M == b].sum())
        gap_S[b_S == b] += _numbers(low[taken : taken + count * b], b, count)
        taken += count * b
    end_S = np.cumsum(gap_S + 1)
    last_M = np.cumsum(written) - 1
    place_S = end_S - 1 - np.repeat(np.concatenate([[0], end_S[last_M[:-1]]]), written)
    if (place_S[last_M] >= columns).any():
        raise _damaged("a position beyond its token")
    side = np.zeros((rows, int(columns[-1])), bool)
    side[np.repeat(np.arange(rows), written), place_S] = True
    return np.nonzero(_flip(side, columns, top_k))[1].reshape(rows, top_k).astype(np.int32), end


def _bits(numbers: np.ndarray, width: int) -> np.ndarray:
    places = np.arange(width)[::-1]
    bits: np.ndarray = ((numbers[:, None] >> places) & 1).astype(np.uint8).reshape(-1)
    return bits


def _numbers(bits: np.ndarray, width: int, count: int) -> np.ndarray:
    numbers: np.ndarray = bits.reshape(count, width).astype(np.int64) @ (1 << np.arange(width, dtype=np.int64)[::-1])
    return numbers


def _damaged(what: str) -> RouteError:
    return RouteError("payload", "packed positions are damaged", got=what, expected="unchanged bytes")
