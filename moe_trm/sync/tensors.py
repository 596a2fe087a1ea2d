"""Tensors as a push holds them: their dtypes, bytes and digests."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pushed_dtype(name: str, dtype: str) -> str:
    """The dtype in which the Hugging Face tensor `name` goes to an engine in `dtype`.

    Biases that choose experts stay float32, as the engine holds them: rounded, they would choose others than the
    learner's.
    """
    return "float32" if name.endswith(".e_score_correction_bias") else dtype


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The contiguous bytes of a tensor, on the CPU, without a copy where there is none to make."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def tensor_digest(tensor: Tensor) -> str:
    """blake2b-16 hex digest of a tensor's bytes: what a push manifest holds."""
    return hashlib.blake2b(tensor_bytes(tensor), digest_size=16).hexdigest()
