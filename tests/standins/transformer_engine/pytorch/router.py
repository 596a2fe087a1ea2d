"""Fused routing, which takes no routes of others. Megatron-Core uses it with `moe_router_fusion` alone."""

from __future__ import annotations

from typing import Any


def _never(*_args: Any, **_options: Any) -> Any:
    raise AssertionError("a fused router replays nothing")


fused_topk_with_score_function = fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = _never
