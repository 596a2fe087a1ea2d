"""SGLang's hash of a tensor on a CUDA device, computed on the host, so that a push to a GPU engine can be proved.

The tensor's bytes are 32-bit words w_i (zero-padded at the end), in tiles of 8,192. With uint32 arithmetic, fmix the
finaliser of MurmurHash3 and two streams j of seeds s_j, position constants c_j and rotations r_j:

    h_j(tile) = fmix( 4 n  xor  sum_{i in tile} fmix( w_i xor ((i c_j + s_j) xor rotl(i, r_j)) ) )
    hash      = splitmix64( sum_tiles  2^32 h_1 + h_2  mod 2^64 ),    n = number of words

Source: SGLang 0.5.23, `kernels/ops/memory/gpu_tensor_hash.py` with its default arguments.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TILE_WORDS = 8192
_SEED = 0x243F6A88
_STREAMS = (
    (np.uint32(_SEED), np.uint32(0x27D4EB2D), 15),
    (np.uint32(((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF), np.uint32(0x165667B1), 13),
)
_MASK64 = (1 << 64) - 1

Words = NDArray[np.uint32]


class GpuTensorHash:
    """Streaming form with hashlib's interface: `update` with bytes in order, then `hexdigest` (16 hex digits)."""

    def __init__(self) -> None:
        self._rest = b""
        self._num_words = 0
        self._tiles: list[Words] = []

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes; whole tiles are folded at once, so memory does not grow with the tensor."""
        joined = self._rest + bytes(data)
        whole = len(joined) // (4 * TILE_WORDS) * (4 * TILE_WORDS)
        if whole:
            self._fold(np.frombuffer(joined[:whole], "<u4"))
        self._rest = joined[whole:]

    def hexdigest(self) -> str:
        """The hash of everything so far, as `/weights_checker` prints it."""
        tail = np.frombuffer(self._rest + bytes(-len(self._rest) % 4), "<u4")
        tiles = [*self._tiles, *([_tile_sums(tail, self._num_words)] if len(tail) else [])]
        num_words = self._num_words + len(tail)
        if not num_words:
            return f"{0:016x}"
        num_bytes = np.uint32(num_words * 4 & 0xFFFFFFFF)
        mixed = _fmix32(np.concatenate(tiles) ^ num_bytes).astype(np.uint64)
        total = (int(mixed[:, 0].sum(dtype=np.uint64)) << 32) + int(mixed[:, 1].sum(dtype=np.uint64))
        return f"{_splitmix64(total & _MASK64):016x}"

    def _fold(self, words: Words) -> None:
        self._tiles.append(_tile_sums(words, self._num_words))
        self._num_words += len(words)


def _tile_sums(words: Words, start: int) -> Words:
    """`[tiles, 2]` sums before the final mixing; the last tile may be short.

    `start`: words before these, a whole number of tiles.
    """
    index = np.arange(start, start + len(words), dtype=np.uint64).astype(np.uint32)
    edges = np.arange(0, len(words), TILE_WORDS)
    columns = []
    for seed, constant, rotation in _STREAMS:
        rotated = (index << np.uint32(rotation)) | (index >> np.uint32(32 - rotation))
        mixed = _fmix32(words ^ ((index * constant + seed) ^ rotated))
        columns.append(np.add.reduceat(mixed, edges, dtype=np.uint32))
    return np.stack(columns, axis=1)


def _fmix32(x: Words) -> Words:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _splitmix64(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31
