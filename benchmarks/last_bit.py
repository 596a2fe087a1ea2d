"""A fault for a rollout server: attention adds one last bit more to the stream in one layer, in every number.

`planted` gives the environment in which SGLang loads it as a plugin. No bound on rounding sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.stale_decoder import with_plugin

LAYER = 2
FORWARD = "sglang.srt.models.qwen3_moe.Qwen3MoeAttention.forward"


def planted(folder: Path) -> dict[str, str]:
    """Variables of a server with the fault; `folder` gets the description by which SGLang finds the plugin."""
    return with_plugin(folder, "last_bit")


def activate() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FORWARD, around, HookType.AROUND)


def around(forward: Callable[..., Tensor], attention: Any, *args: Any, **options: Any) -> Tensor:
    """The layer's attention."""
    out = forward(attention, *args, **options)
    return torch.nextafter(out, torch.full_like(out, torch.inf)) if attention.attn.layer_id == LAYER else out
