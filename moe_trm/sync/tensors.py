"""Bytes and digests of tensors."""

from __future__ import annotations

import hashlib
import os

import torch
from torch import Tensor

HASH_THREADS = min(8, os.cpu_count() or 1)
"""Threads that hash at the same time: hashing frees the interpreter, and is slower than memory by far."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The contiguous bytes of a tensor, on the CPU, without a copy where there is none to make."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_digest(tensor: Tensor) -> str:
    """blake2b-16 hex digest of a tensor's bytes: what a push manifest holds."""
    return hashlib.blake2b(tensor_bytes(tensor), digest_size=16).hexdigest()
