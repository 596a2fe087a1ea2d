"""The model of the stages: `python -m benchmarks.gpu.model FOLDER OUT [--seconds S] [--tiny]`.

Without `--seconds` it has random weights. With them it is taught sums for so long, so that RL has something to improve.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch

from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint, save
from moe_trm.tasks.arithmetic import held_out_problems
from moe_trm.tools.quickstart.warmup import Warmup, WarmupRecipe

# Heads of 64, which SGLang's CUDA kernels want; eight experts a token, so that sums over experts have an order.
LARGE = TinyShape(
    layers=8, hidden=512, heads=8, kv_heads=4, head_dim=64, experts=64, top_k=8, expert_ffn=128, max_positions=4096
)
TINY = TinyShape(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=64, experts=16, top_k=8, expert_ffn=32)
MIXED = 0.2
"""Share of the time in which most answers are bare guesses: a start that RL can improve."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    shape = TINY if args.tiny else LARGE
    if args.seconds:
        args.out.write_text(json.dumps(taught(shape, args.folder, args.seconds), indent=1))
    else:
        make_checkpoint(args.folder, 0, shape)


def taught(shape: TinyShape, folder: Path, seconds: float) -> dict[str, object]:
    """Figures of a warm-up of `seconds`, whose model is saved in `folder`."""
    if torch.cuda.is_available():
        torch.set_default_device("cuda")
    recipe = dataclasses.replace(WarmupRecipe(), lr=5e-4, max_cpu_seconds=float("inf"))
    warmup, start_s = Warmup(0, recipe, shape=shape), time.monotonic()
    loss = float("nan")
    while (elapsed_s := time.monotonic() - start_s) < seconds:
        loss = warmup.supervised_step(direct_share=recipe.direct_share if elapsed_s > (1 - MIXED) * seconds else 0.0)
    problems = held_out_problems(recipe.max_digits, 128)
    figures = {
        "parameters": sum(parameter.numel() for parameter in warmup.model.parameters()),
        "steps": warmup.step,
        "loss": loss,
        "greedy accuracy": warmup.accuracy(problems),
        "accuracy with working": warmup.accuracy(problems, ban_direct=True),
    }
    save(warmup.model.to("cpu"), warmup.tokenizer, folder)
    return figures


if __name__ == "__main__":
    main()
