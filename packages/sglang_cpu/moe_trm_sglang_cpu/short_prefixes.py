"""Short requests leave nothing in SGLang's prefix cache: keeping a few tokens takes longer than computing them again.

SGLang enters every prompt and every answer into a tree, and cuts the nodes where prompts end. Of a hundred short
answers that takes as long as two or three passes. It has a mark for requests that are kept out of the tree, which short
ones get here. A prompt that others wait for (`shared_prompts`) is entered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_trm_sglang_cpu.shared_prompts import AWAITED

MOST_TOKENS = 64
"""Longest request, in tokens with keys in the cache, that is kept out."""


def checkpoint(native: Callable[[Any, Any], None], req: Any, tree_cache: Any) -> None:
    """Around SGLang's `checkpoint_kv_cache`, of a request that goes on."""
    if getattr(req, AWAITED, False):
        native(req, tree_cache)
    else:
        _kept_out(req, tree_cache, req.extend_end, lambda: native(req, tree_cache))


def release(native: Callable[..., None], req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    """Around SGLang's `release_kv_cache`, of a request that ends."""
    held = req.owned_kv_len() if req.kv.holds_kv else 0
    _kept_out(req, tree_cache, held, lambda: native(req, tree_cache, checkpoint=checkpoint))


def _kept_out(req: Any, tree_cache: Any, num_tokens: int, work: Callable[[], None]) -> None:
    marked = req.skip_radix_cache_insert
    # A session goes on where its request ended; states that are handed to the tree must find it.
    short = num_tokens <= MOST_TOKENS and req.session is None and not tree_cache.supports_mamba()
    req.skip_radix_cache_insert = marked or short
    try:
        work()
    finally:
        req.skip_radix_cache_insert = marked


def register() -> None:
    """Let SGLang call these functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.mem_cache.common.checkpoint_kv_cache", checkpoint, HookType.AROUND)
    HookRegistry.register("sglang.srt.mem_cache.common.release_kv_cache", release, HookType.AROUND)
