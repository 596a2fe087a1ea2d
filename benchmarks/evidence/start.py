"""A start with entropy left, for runs in which staleness and corrections can be seen.

`python -m benchmarks.evidence.start [--out DIR]` continues the quickstart's start by supervised steps that always show
the working, of sums up to five digits. It then solves two of three four-digit sums at temperature 1. The
quickstart's own start is solved in five steps and ends nearly deterministic, so that no rule has anything to do.

With `--deep` it makes the start of `natural_rounding.yaml` from random weights: more layers and experts, so that
rounding flips more of them, and sums of up to three digits.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM

from benchmarks.options import command_line
from moe_trm.models.tiny.checkpoint import TinyShape, save
from moe_trm.tools.quickstart.trials import prepare_checkpoint
from moe_trm.tools.quickstart.warmup import Warmup, WarmupRecipe

RECIPE = replace(WarmupRecipe(), batch_size=48, max_digits=5, lr=1e-3, max_new_tokens=64)
STEPS = 240
"""Half of the schedule: a learning rate that has not come down leaves entropy, and a start that RL can improve."""
DEEP = TinyShape(layers=24, hidden=64, heads=2, kv_heads=1, head_dim=32, experts=32, top_k=4, expert_ffn=32)
DEEP_RECIPE, DEEP_STEPS = replace(RECIPE, max_digits=3, lr=1.5e-3, steps=1200, max_cpu_seconds=7200.0), 440
"""Of the deep start, which also stops before the learning rate has come down: 600 steps leave little to learn."""
SAID_EVERY = 40
"""Steps between two lines."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--out", type=Path, help="folder of the checkpoint (runs/entropy-start, runs/deep-start)")
    parser.add_argument("--from-start", type=Path, default=Path("runs/quickstart-start"), help="the quickstart's start")
    parser.add_argument("--deep", action="store_true", help="24 layers with 32 experts each, from random weights")
    args = parser.parse_args(argv)
    torch.set_num_threads(min(2, len(os.sched_getaffinity(0))))
    out = args.out or Path("runs/deep-start" if args.deep else "runs/entropy-start")
    if (out / "warmup.json").exists():
        print(f"{out} is there already (delete the folder to make it anew)")
    elif args.deep:
        make(DEEP, out, DEEP_RECIPE, DEEP_STEPS)
    else:
        make(prepare_checkpoint(args.from_start), out)
    return 0


def make(start: Path | TinyShape, out: Path, recipe: WarmupRecipe = RECIPE, steps: int = STEPS, seed: int = 1) -> None:
    """Write the checkpoint that so many steps of `recipe` make of `start`, or of random weights of that shape.

    Sums are drawn by `seed`.
    """
    warmup = Warmup(seed=seed, recipe=recipe, shape=start if isinstance(start, TinyShape) else None)
    if isinstance(start, Path):
        warmup.model = Qwen3MoeForCausalLM.from_pretrained(start, dtype=torch.float32)
        warmup.model.set_experts_implementation("grouped_mm")
        warmup.optimizer = torch.optim.AdamW(
            warmup.model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01
        )
    for step in range(1, steps + 1):
        loss = warmup.supervised_step(direct_share=0.0)
        if step % SAID_EVERY == 0:
            print(f"step {step} of {steps}: loss {loss:.3f}", flush=True)
    save(warmup.model, warmup.tokenizer, out)
    (out / "warmup.json").write_text(
        json.dumps({"steps": steps, "recipe": asdict(recipe)}, indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())
