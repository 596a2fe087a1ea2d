"""SGLang's hash of a tensor on a CUDA device, computed where the tensor is, so that a push to GPUs can be proved.

The tensor's bytes are 32-bit words w_i (zero-padded at the end), in tiles of 8,192. With uint32 arithmetic, fmix the
finaliser of MurmurHash3 and two streams j of seeds s_j, position constants c_j and rotations r_j:

    h_j(tile) = fmix( 4 n  xor  sum_{i in tile} fmix( w_i xor ((i c_j + s_j) xor rotl(i, r_j)) ) )
    hash      = splitmix64( sum_tiles  2^32 h_1 + h_2  mod 2^64 ),    n = number of words

Within a tile that begins at b, a multiple of its size, i = b + k and rotl(i, r) = rotl(b, r) xor rotl(k, r). So what
depends on k alone is computed once. Torch has no arithmetic of uint32: int32 wraps around alike, and a shift to the
right is masked.

Source: SGLang 0.5.23, `kernels/ops/memory/gpu_tensor_hash.py` with its default arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

TILE_WORDS = 8192
TILE_BYTES = 4 * TILE_WORDS
_TILES_AT_ONCE = {"cpu": 8}
"""By device: intermediate numbers of so many tiles stay in the cache of a core."""
_TILES_ON_DEVICES = 2048
_SEED = 0x243F6A88
_STREAMS = (
    (_SEED, 0x27D4EB2D, 15),
    (((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF, 0x165667B1, 13),
)
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1


class GpuTensorHash:
    """Streaming form: `update` with tensors on any device, whose bytes follow each other, then `hexdigest`."""

    def __init__(self) -> None:
        self._rest: Tensor | None = None
        self._num_tiles = 0
        self._tiles: list[Tensor] = []

    def update(self, tensor: Tensor) -> None:
        """Take the next bytes; whole tiles are folded at once, so memory does not grow with the tensor."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if self._rest is not None and len(self._rest):
            data = torch.cat([self._rest.to(data.device), data])
        num_tile_bytes = len(data) // TILE_BYTES * TILE_BYTES
        self._rest = data[num_tile_bytes:].clone()
        if num_tile_bytes:
            words = _words(data[:num_tile_bytes]).view(-1, TILE_WORDS)
            self._tiles.append(_tile_sums(words, self._num_tiles))
            self._num_tiles += len(words)

    def hexdigest(self) -> str:
        """The hash of everything so far in 16 hex digits, as `/weights_checker` prints it."""
        tiles, num_words = [*self._tiles], self._num_tiles * TILE_WORDS
        if self._rest is not None and len(self._rest):
            padded = torch.nn.functional.pad(self._rest, (0, -len(self._rest) % 4))
            tail = _words(padded)
            tiles.append(_tile_sums(tail[None], self._num_tiles))
            num_words += len(tail)
        if not num_words:
            return f"{0:016x}"
        sums = torch.cat([tile.cpu() for tile in tiles])
        mixed = _mix(sums ^ _signed(4 * num_words), torch.empty_like(sums)).long() & _MASK32
        total = (int(mixed[:, 0].sum()) << 32) + int(mixed[:, 1].sum())
        return f"{_splitmix64(total & _MASK64):016x}"


def _words(data: Tensor) -> Tensor:
    """Bytes as 32-bit words, which have to be aligned."""
    return (data if data.storage_offset() % 4 == 0 else data.clone()).view(torch.int32)


def _tile_sums(words_TW: Tensor, first: int) -> Tensor:
    """`[T, 2]` sums before the final mixing. W: words of a tile, fewer in the last. `first`: number of the first."""
    device, (num_tiles, width) = words_TW.device, words_TW.shape
    at_once = min(num_tiles, _TILES_AT_ONCE.get(device.type, _TILES_ON_DEVICES))
    sums = torch.empty(num_tiles, len(_STREAMS), dtype=torch.int32, device=device)
    first_buffer, second_buffer = torch.empty(2, at_once, width, dtype=torch.int32, device=device)
    for stream, ((seed, constant, rotation), (products, rotated)) in enumerate(
        zip(_STREAMS, _positions(device), strict=True)
    ):
        for start, words in _blocks(words_TW, at_once):
            bases = [(first + start + tile) * TILE_WORDS & _MASK32 for tile in range(len(words))]
            added = _column([base * constant + seed for base in bases], device)
            turned = _column([_rotl(base, rotation) for base in bases], device)
            mixed, scratch = first_buffer[: len(words)], second_buffer[: len(words)]
            torch.add(products[:width], added, out=mixed)
            mixed.bitwise_xor_(rotated[:width]).bitwise_xor_(turned).bitwise_xor_(words)
            torch.sum(_mix(mixed, scratch), 1, dtype=torch.int32, out=sums[start : start + len(words), stream])
    return sums


def _blocks(words_TW: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(words_TW), size):
        yield start, words_TW[start : start + size]


@cache
def _positions(device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """For each stream `[TILE_WORDS]` k c and rotl(k, r) of the places k in a tile."""
    places = torch.arange(TILE_WORDS, dtype=torch.int64)
    pairs = []
    for _, constant, rotation in _STREAMS:
        rotated = (places << rotation | places >> 32 - rotation) & _MASK32
        pairs.append((_wrapped(places * constant).to(device), _wrapped(rotated).to(device)))
    return tuple(pairs)


def _column(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor([[_signed(number)] for number in numbers], dtype=torch.int32, device=device)


def _mix(x: Tensor, scratch: Tensor) -> Tensor:
    """fmix of each word, in place."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_(_MASK32 >> shift))
        if factor:
            x.mul_(_signed(factor))
    return x


def _wrapped(numbers: Tensor) -> Tensor:
    """int64 numbers modulo 2^32, as int32."""
    low = numbers & _MASK32
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)


def _signed(number: int) -> int:
    """The int32 with the last 32 bits of a number."""
    low = number & _MASK32
    return low - (1 << 32) if low >> 31 else low


def _rotl(number: int, count: int) -> int:
    return (number << count | number >> 32 - count) & _MASK32


def _splitmix64(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31
