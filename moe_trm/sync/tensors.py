"""Bytes and digests of tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from math import prod
from typing import TypeVar

import torch
import xxhash
from torch import Tensor

from moe_trm.sync.manifest import TensorEntry
from moe_trm.sync.rounding import DTYPES

T = TypeVar("T")

HASH_THREADS = min(8, len(os.sched_getaffinity(0)))
"""Threads that hash at the same time: hashing frees the interpreter, and is slower than memory by far."""
LOT_BYTES = 32 << 20
"""Bytes that a thread takes at once. What is smaller in all is done without threads: they would wait for each other."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The contiguous bytes of a tensor, on the CPU, without a copy where there is none to make."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_digest(tensor: Tensor) -> str:
    """XXH3-128 of a tensor's bytes, in hex: what a push manifest holds.

    It is there to find damage, not an attacker, who could write a manifest, too. It is as fast as memory.
    Source: github.com/Cyan4973/xxHash, `doc/xxhash_spec.md`.
    """
    return bytes_digest(tensor_bytes(tensor))


def bytes_digest(data: bytes | memoryview) -> str:
    """`tensor_digest` of a tensor with these bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def num_bytes(entry: TensorEntry) -> int:
    """Size of a pushed tensor."""
    return prod(entry.shape) * DTYPES[entry.dtype].itemsize


def in_lots(items: Iterable[tuple[T, int]], most: int = LOT_BYTES) -> Iterator[list[T]]:
    """Items with their bytes, in runs of about `most`: a run ends with the item that reaches it."""
    lot: list[T] = []
    size = 0
    for item, num_bytes in items:
        lot.append(item)
        size += num_bytes
        if size >= most:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot
