"""Sets of K experts out of E as numbers, and those numbers as packed bits.

The rank of the ascending set `c_1 < ... < c_K` is `C(c_1, 1) + C(c_2, 2) + ... + C(c_K, K)`, a bijection onto `0 ..
C(E, K) - 1` (the combinatorial number system, Lehmer 1964). Ranks take `ceil(log2 C(E, K))` bits: 41 for 8 of 128, 69
for 10 of 512. They are held in two limbs of 63 bits, so that sums of limbs never leave uint64.

Shape letters: M sets, K experts per set, E experts, W bits of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import comb

import numpy as np

from routing.errors import RouteError

_LIMB = 63
_LOW = np.uint64((1 << _LIMB) - 1)
_CHUNK = 1 << 14
_WORD = 64


def rank_bits(num_experts: int, top_k: int) -> int:
    """`W`: bits of one rank. Raises `RouteError` when it exceeds the two limbs (126)."""
    # At least one bit, so that the length of packed bytes always bounds the number of sets.
    bits = max(1, (comb(num_experts, top_k) - 1).bit_length())
    if bits > 2 * _LIMB:
        raise RouteError(
            "payload",
            "too many expert sets for the set codec",
            got=f"{bits} bits per set of {top_k} of {num_experts}",
            expected=f"at most {2 * _LIMB}",
            fix='Encode with order="engine".',
        )
    return bits


def packed_bytes(num_sets: int, num_experts: int, top_k: int) -> int:
    """Bytes that `pack` writes for `num_sets` sets."""
    return (num_sets * rank_bits(num_experts, top_k) + 7) // 8


def pack(sets: np.ndarray, num_experts: int) -> bytes:
    """Ascending distinct ids `[M, K]` to their ranks, W bits each, most significant bit first, zeros at the end."""
    top_k = sets.shape[1]
    width = rank_bits(num_experts, top_k)
    return b"".join(_to_bits(*_rank(sets[part], num_experts), width) for part in _parts(len(sets)))


def unpack(body: bytes | memoryview, num_sets: int, num_experts: int, top_k: int) -> np.ndarray:
    """Inverse of `pack`: ascending ids `[M, K]` int64.

    Raises `RouteError` for a rank that is no set, or padding that is not zero.
    """
    width = rank_bits(num_experts, top_k)
    bits = num_sets * width
    if len(body) != packed_bytes(num_sets, num_experts, top_k) or (bits % 8 and body[-1] & ((1 << (8 - bits % 8)) - 1)):
        raise RouteError(
            "payload", "packed sets have the wrong length or padding", got=len(body), expected=f"{bits} bits"
        )
    sets = np.zeros((num_sets, top_k), dtype=np.int64)
    raw = np.frombuffer(body, dtype=np.uint8)
    for part in _parts(num_sets):
        first, last = part.start * width // 8, (part.stop * width + 7) // 8
        high, low = _from_bits(raw[first:last], part.stop - part.start, width)
        sets[part] = _unrank(high, low, num_experts, top_k)
    return sets


def _parts(count: int) -> Iterator[slice]:
    # A multiple of eight sets is a whole number of bytes, so parts join without shifting.
    for start in range(0, count, _CHUNK):
        yield slice(start, min(start + _CHUNK, count))


@cache
def _table(num_experts: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """High and low limbs `[K, E]` of `C(c, k + 1)`."""
    values = [[comb(c, k) for c in range(num_experts)] for k in range(1, top_k + 1)]
    high = np.array([[value >> _LIMB for value in row] for row in values], dtype=np.uint64)
    low = np.array([[value & int(_LOW) for value in row] for row in values], dtype=np.uint64)
    return high, low


def _rank(sets: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    table_high, table_low = _table(num_experts, sets.shape[1])
    high, low = np.zeros(len(sets), dtype=np.uint64), np.zeros(len(sets), dtype=np.uint64)
    for place in range(sets.shape[1]):
        low += table_low[place][sets[:, place]]
        high += table_high[place][sets[:, place]] + (low >> np.uint64(_LIMB))
        low &= _LOW
    return high, low


def _unrank(high: np.ndarray, low: np.ndarray, num_experts: int, top_k: int) -> np.ndarray:
    if len(high) and int(high.max()) >= (limit := comb(num_experts, top_k)) >> _LIMB:
        over = (high > np.uint64(limit >> _LIMB)) | (
            (high == np.uint64(limit >> _LIMB)) & (low >= np.uint64(limit & int(_LOW)))
        )
        if over.any():
            raise RouteError(
                "payload",
                "a packed rank is no set of experts",
                where=f"set {int(over.argmax())} of its part",
                expected=f"below C({num_experts}, {top_k})",
            )
    table_high, table_low = _table(num_experts, top_k)
    wide = bool(table_high.any())
    sets = np.empty((len(low), top_k), dtype=np.int64)
    for place in reversed(range(top_k)):
        best = (
            _largest_wide(table_high[place], table_low[place], high, low)
            if wide
            else np.searchsorted(table_low[place], low, side="right") - 1
        )
        sets[:, place] = best
        taken = table_low[place][best]
        borrow = (low < taken).astype(np.uint64)
        high = high - table_high[place][best] - borrow
        low = (low + (borrow << np.uint64(_LIMB))) - taken
    return sets


def _largest_wide(table_high: np.ndarray, table_low: np.ndarray, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Largest index whose two-limb entry is at most `(high, low)`; the table ascends and starts at zero."""
    best = np.zeros(len(low), dtype=np.int64)
    for step in (1 << bit for bit in reversed(range(len(table_low).bit_length()))):
        trial = np.minimum(best + step, len(table_low) - 1)
        fits = (table_high[trial] < high) | ((table_high[trial] == high) & (table_low[trial] <= low))
        best = np.where(fits, trial, best)
    return best


def _to_bits(high: np.ndarray, low: np.ndarray, width: int) -> bytes:
    """64 ranks of W bits are W words of 64 bits: each rank is shifted into the two or three words it touches."""
    groups = -(-len(low) // _WORD)
    words_WG = np.zeros((width, groups), dtype=np.uint64)
    for place, (upper_G, lower_G) in enumerate(zip(_by_place(high), _by_place(low), strict=True)):
        last = (place + 1) * width - 1
        # Bits of the rank below `last` in the word of its last bit, then those that spill into the words before.
        _put(words_WG, lower_G, last, min(width, _LIMB))
        if width > _LIMB:
            _put(words_WG, upper_G, last - _LIMB, width - _LIMB)
    return words_WG.T.astype(">u8").tobytes()[: (len(low) * width + 7) // 8]


def _from_bits(raw: np.ndarray, count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    groups = -(-count // _WORD)
    padded = np.zeros(groups * width * 8, dtype=np.uint8)
    padded[: len(raw)] = raw
    words_WG = np.ascontiguousarray(padded.view(">u8").reshape(groups, width).T).astype(np.uint64)
    high, low = np.zeros((_WORD, groups), dtype=np.uint64), np.zeros((_WORD, groups), dtype=np.uint64)
    for place in range(_WORD):
        last = (place + 1) * width - 1
        low[place] = _take(words_WG, last, min(width, _LIMB))
        if width > _LIMB:
            high[place] = _take(words_WG, last - _LIMB, width - _LIMB)
    return high.T.reshape(-1)[:count], low.T.reshape(-1)[:count]


def _by_place(limb: np.ndarray) -> np.ndarray:
    """`[64, G]`: rank `64 g + i` at `[i, g]`, zeros behind the last."""
    padded = np.zeros(-(-len(limb) // _WORD) * _WORD, dtype=np.uint64)
    padded[: len(limb)] = limb
    return np.ascontiguousarray(padded.reshape(-1, _WORD).T)


def _put(words_WG: np.ndarray, value_G: np.ndarray, last: int, width: int) -> None:
    """Write `value` (`width` bits, at most 63) with its least significant bit at bit `last` of the words.

    Bits are counted from 0.
    """
    word, shift = last // _WORD, _WORD - 1 - last % _WORD
    words_WG[word] |= value_G << np.uint64(shift)
    if shift + width > _WORD:
        words_WG[word - 1] |= value_G >> np.uint64(_WORD - shift)


def _take(words_WG: np.ndarray, last: int, width: int) -> np.ndarray:
    word, shift = last // _WORD, _WORD - 1 - last % _WORD
    value = words_WG[word] >> np.uint64(shift)
    if shift + width > _WORD:
        value = value | (words_WG[word - 1] << np.uint64(_WORD - shift))
    taken: np.ndarray = value & np.uint64((1 << width) - 1)
    return taken
