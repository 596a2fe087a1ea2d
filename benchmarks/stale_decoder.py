"""A fault for a rollout server: decoding goes on with old weights of one layer, as a captured graph may.

`planted` gives the environment in which SGLang loads it as a plugin. The layer's parameters are right, and so are their
checksums and every prefill. Decoding uses the copy that was made at the first forward pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYER = 1
FORWARD = "sglang.srt.models.qwen3_moe.Qwen3MoeDecoderLayer.forward"
REPOSITORY = Path(__file__).resolve().parents[1]


def planted(folder: Path) -> dict[str, str]:
    """Variables of a server with the fault; `folder` gets the description by which SGLang finds the plugin."""
    return with_plugin(folder, "stale_decoder")


def with_plugin(folder: Path, module: str) -> dict[str, str]:
    """Variables of a server that loads `benchmarks/MODULE.py` as a plugin."""
    info = folder / f"{module}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{module} = benchmarks.{module}:activate\n")
    paths = [str(folder), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def activate() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(FORWARD, around, HookType.AROUND)


def around(forward: Callable[..., Any], layer: Any, *args: Any, **options: Any) -> Any:
    """The layer's forward pass; of `LAYER` with its first weights where the pass decodes."""
    if layer.layer_id != LAYER:
        return forward(layer, *args, **options)
    parameters = dict(layer.named_parameters())
    if not hasattr(layer, "first_weights"):
        layer.first_weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    decodes = any(
        value.forward_mode.is_decode() for value in [*args, *options.values()] if hasattr(value, "forward_mode")
    )
    present = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items() if decodes else ():
            parameter.data = layer.first_weights[name]
        return forward(layer, *args, **options)
    finally:
        for name, parameter in parameters.items():
            parameter.data = present[name]
