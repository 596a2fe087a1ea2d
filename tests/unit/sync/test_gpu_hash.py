"""Golden values come from SGLang 0.5.23's own Triton kernel, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from moe_trm.rollout.sglang.gpu_hash import GpuTensorHash

GOLDEN = [(3, "cf5fe69b68759b12"), (20000, "3fadc80e297acd67")]


@pytest.mark.parametrize(("count", "expected"), GOLDEN)
@pytest.mark.parametrize("piece", [7, 1000, 32768, 1 << 20])
def test_golden_values_whatever_the_pieces(count: int, expected: str, piece: int) -> None:
    data = np.arange(count, dtype="<i4").tobytes()
    digest = GpuTensorHash()
    for start in range(0, len(data), piece):
        digest.update(data[start : start + piece])
    assert digest.hexdigest() == expected


def test_every_bit_counts_and_so_does_its_place() -> None:
    data = bytearray(np.arange(9000, dtype="<i4").tobytes())
    seen = {_hash(data)}
    for place in (0, 1, 4 * 8191, 4 * 8192, len(data) - 1):
        data[place] ^= 1
        seen.add(_hash(data))
    swapped = data[4:8] + data[:4] + data[8:]
    assert len(seen | {_hash(swapped), _hash(data[:-4])}) == 8


def test_nothing_hashes_to_zero() -> None:
    assert GpuTensorHash().hexdigest() == "0" * 16


def _hash(data: bytearray) -> str:
    digest = GpuTensorHash()
    digest.update(bytes(data))
    return digest.hexdigest()
