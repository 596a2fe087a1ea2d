"""SGLang plugin (entry-point group `sglang.srt.plugins`), loaded by SGLang itself in each of its processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


def allocate_plain(
    dims: Sequence[int],
    dtype: Any,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> Any:
    """A host buffer without CUDA registration. Same signature as SGLang's own entries of `ALLOC_MEMORY_FUNCS`."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def activate() -> None:
    """Register the CPU allocator that `--enable-return-routed-experts` needs, unless SGLang brings one."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    # A default dict whose fallback registers the buffer with CUDA: membership, not lookup, tells whether "cpu" is known.
    if "cpu" not in ALLOC_MEMORY_FUNCS:
        ALLOC_MEMORY_FUNCS["cpu"] = allocate_plain
