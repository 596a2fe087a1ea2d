"""Stand-in for the names of `sgl_kernel` that SGLang 0.5.23 imports with SGLANG_USE_CPU_ENGINE=1.

No AMX operator (`convert_weight_packed` and its kin) is defined: SGLang then finds no AMX support and takes its
torch-native path. Names without an implementation import, and raise when called.

Shape letters: R requests, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import mamba  # noqa: F401 - SGLang's models look its operators up when they are imported

_MASK32 = 0xFFFFFFFF
_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]


def _rotate_left(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK32


def _absorb(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """One 4-byte block of MurmurHash3-32. Products of two 32-bit values wrap in int64; their low 32 bits are exact."""
    word = _rotate_left((word * 0xCC9E2D51) & _MASK32, 15)
    word = (word * 0x1B873593) & _MASK32
    return (_rotate_left(state ^ word, 13) * 5 + 0xE6546B64) & _MASK32


def murmur_hash32(seed_R: torch.Tensor, positions_R: torch.Tensor, columns_C: torch.Tensor) -> torch.Tensor:
    """MurmurHash3-32 of the 16 bytes (seed low, seed high, position, column).

    Returns `[R, C]` uint32, the noise of the engine's seeded sampling.
    """
    seed, positions = seed_R.to(torch.int64), positions_R.to(torch.int64)
    state = torch.zeros_like(seed)
    for word in (seed & _MASK32, (seed >> 32) & _MASK32, positions & _MASK32):
        state = _absorb(state, word)
    state = _absorb(state[:, None], (columns_C.to(torch.int64) & _MASK32)[None, :]) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK32
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK32
    return (state ^ (state >> 16)).to(torch.uint32)


_MURMUR = "murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor"
_LIBRARY.define(_MURMUR)  # type: ignore[no-untyped-call]
_LIBRARY.impl("murmur_hash32_cpu", murmur_hash32, "CPU")  # type: ignore[no-untyped-call]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots into its row of `req_to_token`, at columns `start..end`."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"sgl_kernel.{name} has no CPU stand-in in moe-trm-sglang-cpu; install a real sgl_kernel to use it"
        )

    missing.__name__ = name
    return missing
