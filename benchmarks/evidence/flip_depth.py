"""Flips of routers between two precisions, by depth, experts, top-k and precision.

`python -m benchmarks.evidence.flip_depth [--seeds N] [--json FILE] [--picture FILE]`. Tiny Qwen3-MoE models with random
weights score random tokens in float32 and in a lower precision, from the same rounded weights, so that arithmetic alone
differs. No engine takes part. Three questions:

- how the share of tokens with a flip in any layer grows with depth, and 1 - prod_l (1 - p_l), which is the same share
  if flips of layers were independent (p_l is the share in layer l);
- how the rate in a layer depends on its depth, the number of experts, top-k and the precision;
- how many flips the batch alone makes: rows computed together against each row alone, in one precision (`batch`).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.evidence.pictured import axis, run, with_interval
from benchmarks.figure import Panel, document, lines
from benchmarks.options import command_line
from benchmarks.table import Row
from moe_trm.models.tiny.checkpoint import TinyShape, tiny_model
from routing.judge.flips import Flips, flips

BASE = TinyShape(layers=8, hidden=64, heads=2, kv_heads=1, head_dim=32, experts=16, top_k=2, expert_ffn=32)
DEPTHS = (2, 4, 8, 16, 24)
EXPERTS = (8, 16, 32, 64, 128)
TOP_K = (1, 2, 4, 8)
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = {**PRECISIONS, "float32": torch.float32}
COMPOSITION = "batch"
"""The sweep that compares batches and no precisions."""
ROWS, TOKENS = 8, 64
FIRST_ID = 4
"""Ids below are special."""


@dataclass(frozen=True)
class Point:
    """One model in two precisions."""

    any_layer: float
    independent: float
    first_layer: float
    last_layer: float
    token_layers: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--seeds", type=int, default=4, help="random models (default: 4)")
    title = "Flips between float32 and a lower precision at the same weights: means over models"
    return run(parser, argv, title, lambda args: measure(args.seeds), draw)


def settings() -> Iterator[tuple[str, str, TinyShape, str]]:
    """Sweep, value, sizes and precision."""
    for depth in DEPTHS:
        yield "layers", str(depth), replace(BASE, layers=depth), "bfloat16"
    for experts in EXPERTS:
        yield "experts", str(experts), replace(BASE, experts=experts), "bfloat16"
    for top_k in TOP_K:
        yield "top_k", str(top_k), replace(BASE, top_k=top_k), "bfloat16"
    for precision in PRECISIONS:
        yield "precision", precision, BASE, precision
    for precision in DTYPES:
        yield COMPOSITION, precision, BASE, precision


def measure(seeds: int) -> Iterator[Row]:
    """One row per setting: means over random models, and the 95% intervals of the rates."""
    for sweep, value, shape, precision in settings():
        compare = regrouped if sweep == COMPOSITION else compared
        points = [point(compare(shape, precision, seed, ROWS)) for seed in range(seeds)]
        row: Row = {"sweep": sweep, "value": value}
        for name in ("any_layer", "independent", "token_layers"):
            row |= with_interval(name, [getattr(model_point, name) for model_point in points], f"{name}_")
        yield {
            **row,
            "first_layer": statistics.fmean(model_point.first_layer for model_point in points),
            "last_layer": statistics.fmean(model_point.last_layer for model_point in points),
        }


def point(model_flips: Flips) -> Point:
    """Flips of one random model on random tokens."""
    return Point(
        any_layer=model_flips.token_any_layer_rate,
        independent=independent(model_flips.per_layer),
        first_layer=float(model_flips.per_layer[0]),
        last_layer=float(model_flips.per_layer[-1]),
        token_layers=model_flips.token_layer_rate,
    )


def compared(shape: TinyShape, precision: str, seed: int, rows: int = ROWS) -> Flips:
    """The routes in float32 against the routes in `precision`, at the weights that `precision` can hold."""
    model, ids = tiny_model(seed, shape).eval(), tokens(shape, seed, rows)
    low = routes(model.to(PRECISIONS[precision]), ids)
    high = routes(model.to(torch.float32), ids)
    return flips(high, low, num_experts=shape.experts)


def regrouped(shape: TinyShape, precision: str, seed: int, rows: int) -> Flips:
    """The routes of rows computed together against the routes of each row alone, in the same precision."""
    model, ids = tiny_model(seed, shape).eval().to(DTYPES[precision]), tokens(shape, seed, rows)
    routes_alone = torch.cat([routes(model, ids[row : row + 1]) for row in range(rows)])
    return flips(routes(model, ids), routes_alone, num_experts=shape.experts)


def tokens(shape: TinyShape, seed: int, rows: int) -> Tensor:
    """Random ids, `[rows, tokens]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ID, shape.vocab_size, (rows, TOKENS), generator=generator)


def independent(per_layer: np.ndarray) -> float:
    """1 - prod_l (1 - p_l): the share of tokens with a flip in any layer, were the layers independent."""
    return float(1 - np.prod(1 - per_layer))


@torch.no_grad()
def routes(model: nn.Module, ids: Tensor) -> Tensor:
    """The experts that the model chose, `[tokens, L, K]`."""
    experts: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, outputs: Mapping[int, Tensor]) -> None:
        experts.append(outputs[2])

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(keep) for router in routers]
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(experts, 1)


def draw(rows: Sequence[Row]) -> str:
    """SVG: by depth, tokens with a flip and what independent layers would give; beside it, experts and top-k."""
    parts: list[str] = []
    panels = (
        ("layers", {"any layer": "any_layer", "if independent": "independent", "in a layer": "token_layers"}),
        ("experts", {"any layer": "any_layer", "in a layer": "token_layers"}),
        ("top_k", {"any layer": "any_layer", "in a layer": "token_layers"}),
    )
    for right, (sweep, series) in enumerate(panels):
        points = [row for row in rows if row["sweep"] == sweep]
        highest = 1.1 * max(float(row["any_layer"]) for row in points)
        x0 = 60 + 400 * right
        panel = Panel(x0, x0 + 220, len(points) + 0.5, 0, highest)
        parts += panel.frame(
            f"Flips by {sweep}", [(highest * part / 4, f"{highest * part / 4:.1%}") for part in range(5)]
        )
        parts += axis(panel, [row["value"] for row in points], sweep)
        parts += lines(panel, {name: [float(row[key]) for row in points] for name, key in series.items()})
    return document(parts, 60 + 400 * len(panels), 360)


if __name__ == "__main__":
    sys.exit(main())
