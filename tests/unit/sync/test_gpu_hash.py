"""Golden values come from SGLang 0.5.23's own Triton kernel, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_trm.rollout.sglang.gpu_hash import TILE_WORDS, GpuTensorHash, _tile_sums
from tests.unit.other_device import DEVICE, other_device

GOLDEN = [(3, "cf5fe69b68759b12"), (20000, "3fadc80e297acd67")]


@pytest.mark.parametrize(("count", "expected"), GOLDEN)
@pytest.mark.parametrize("piece", [7, 1000, 32768, 1 << 20])
def test_golden_values_whatever_the_pieces(count: int, expected: str, piece: int) -> None:
    data = torch.arange(count, dtype=torch.int32).view(torch.uint8)
    digest = GpuTensorHash()
    for part in data.split(piece):
        digest.update(part)
    assert digest.hexdigest() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_matrix_it_is_that_of_its_bytes(dtype: torch.dtype) -> None:
    """Also of a slice that is not contiguous, and of rows that begin at an odd place."""
    matrix = torch.randn(301, 211, generator=torch.Generator().manual_seed(0)).to(dtype)
    for part in (matrix, matrix.mT, matrix[:, 5:91], matrix[1:]):
        assert _hash(part) == _hash(part.contiguous().view(torch.uint8))


def test_every_bit_counts_and_so_does_its_place() -> None:
    data = bytearray(np.arange(9000, dtype="<i4").tobytes())
    seen = {_hash(_of(data))}
    for place in (0, 1, 4 * 8191, 4 * 8192, len(data) - 1):
        data[place] ^= 1
        seen.add(_hash(_of(data)))
    swapped = data[4:8] + data[:4] + data[8:]
    assert len(seen | {_hash(_of(swapped)), _hash(_of(data[:-4]))}) == 8


def test_far_places_wrap_around() -> None:
    """The place of a word is an unsigned number of 32 bits: tiles from the first on, and around 2^31 and 2^32."""
    words = torch.arange(2 * TILE_WORDS, dtype=torch.int32).view(2, TILE_WORDS)
    for first in (0, (1 << 31) // TILE_WORDS - 1, (1 << 32) // TILE_WORDS - 1):
        expected = [[_tile_by_hand(words[tile].tolist(), first + tile, s) for s in range(2)] for tile in range(2)]
        assert _tile_sums(words, first).tolist() == expected


def _tile_by_hand(words: list[int], tile: int, stream: int) -> int:
    """The sum of a tile as the docstring of the module has it, in whole numbers, as an int32."""
    seed, constant, rotation = (
        (0x243F6A88, 0x27D4EB2D, 15),
        (((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) % 2**32, 0x165667B1, 13),
    )[stream]
    total = 0
    for place, word in enumerate(words, tile * 8192):
        i = place % 2**32
        x = word ^ ((i * constant + seed) % 2**32 ^ ((i << rotation | i >> 32 - rotation) % 2**32))
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        total += x ^ x >> 16
    return (total + 2**31) % 2**32 - 2**31


def test_pieces_on_another_device_are_hashed_there() -> None:
    """Also where a tile has parts on both."""
    data = torch.arange(20000, dtype=torch.int32)
    with other_device():
        digest = GpuTensorHash()
        for part in (data[:100], data[100:9000].to(DEVICE), data[9000:].to(DEVICE)):
            digest.update(part)
        assert digest.hexdigest() == GOLDEN[1][1]


def test_nothing_hashes_to_zero() -> None:
    assert GpuTensorHash().hexdigest() == "0" * 16


def _of(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _hash(tensor: Tensor) -> str:
    digest = GpuTensorHash()
    digest.update(tensor)
    return digest.hexdigest()
