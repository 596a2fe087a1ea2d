"""A start with entropy left, for runs in which staleness and corrections can be seen.

`python -m benchmarks.evidence.start [--out DIR]` continues the quickstart's start by supervised steps that always show
the working, of sums up to five digits. It then solves two of three four-digit sums at temperature 1. The
quickstart's own start is solved in five steps and ends nearly deterministic, so that no rule has anything to do.
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
from moe_trm.models.tiny.checkpoint import save
from moe_trm.tools.quickstart.trials import prepare_checkpoint
from moe_trm.tools.quickstart.warmup import Warmup, WarmupRecipe

RECIPE = replace(WarmupRecipe(), batch_size=48, max_digits=5, lr=1e-3, max_new_tokens=64)
STEPS = 240
"""Half of the schedule: a learning rate that has not come down leaves entropy, and a start that RL can improve."""
SAID_EVERY = 40
"""Steps between two lines."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/entropy-start"), help="folder of the checkpoint")
    parser.add_argument("--from-start", type=Path, default=Path("runs/quickstart-start"), help="the quickstart's start")
    args = parser.parse_args(argv)
    torch.set_num_threads(min(2, len(os.sched_getaffinity(0))))
    if (args.out / "warmup.json").exists():
        print(f"{args.out} is there already (delete the folder to make it anew)")
        return 0
    make(prepare_checkpoint(args.from_start), args.out)
    return 0


def make(start: Path, out: Path, recipe: WarmupRecipe = RECIPE, steps: int = STEPS, seed: int = 1) -> None:
    """Write the checkpoint that so many steps of `recipe` make of `start`, on sums drawn by `seed`."""
    warmup = Warmup(seed=seed, recipe=recipe)
    warmup.model = Qwen3MoeForCausalLM.from_pretrained(start, dtype=torch.float32)
    warmup.model.set_experts_implementation("grouped_mm")
    warmup.optimizer = torch.optim.AdamW(warmup.model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
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
