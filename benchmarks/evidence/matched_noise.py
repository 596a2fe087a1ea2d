"""Noise of routers that flips as many token-layers as rounding does, at the start of a suite.

`python -m benchmarks.evidence.matched_noise [CHECKPOINT] [--format FORMAT] [--json FILE]`. The start reads solved sums,
once with its own weights and once as an engine gets them: rounded to the format, or with noise on its routers. The
noise is raised until it flips as many sets of experts, on average over draws. It is meant for `natural_rounding.yaml`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from benchmarks.evidence.flip_bias import bisect
from benchmarks.evidence.flip_depth import routes
from benchmarks.evidence.oracle_answers import ID_OF, served
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.methods.weight_formats import WeightFormat
from moe_trm.models.tiny.checkpoint import BOS, PAD
from moe_trm.sync.rounding import Rounding, RouterNoise
from moe_trm.tasks.problems import draw
from routing.judge.flips import flips

CHECKPOINT, FORMAT = Path("runs/deep-start"), "int4"
PROBLEMS, MAX_DIGITS, DRAWS = 32, 3, 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=CHECKPOINT, help=f"the start ({CHECKPOINT})")
    parser.add_argument("--format", default=FORMAT, choices=get_args(WeightFormat), help=f"default: {FORMAT}")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report("Flips of token-layers against the learner's routes", list(measure(args.checkpoint, args.format)), args.json)
    return 0


def measure(checkpoint: Path, kind: WeightFormat) -> Iterator[Row]:
    """The flips of the format, then the noise that matches them."""
    causal = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    causal.set_experts_implementation("grouped_mm")
    share = flipped(causal, Rounding("float32", kind))
    yield {"engine": kind, "noise": 0.0, "flipped": share}
    noise = matching(causal, share)
    yield {"engine": "noise", "noise": noise, "flipped": by_noise(causal, noise)}


def matching(causal: Any, share: float) -> float:
    """The noise that flips this share of the token-layers."""
    return bisect(lambda relative: by_noise(causal, relative), share)


def by_noise(causal: Any, relative: float) -> float:
    """Flips by noise, mean over draws."""
    noises = [RouterNoise(relative, each_push=False, seed=seed) for seed in range(DRAWS)]
    return fmean(flipped(causal, Rounding("float32", noises=(noise,))) for noise in noises)


def flipped(causal: Any, rounding: Rounding) -> float:
    """Share of token-layers in which the engine chooses another set of experts."""
    ids, valid = solved_sums()
    return flips(routes(causal, ids), routes(served(causal, rounding), ids), valid.flatten()).token_layer_rate


def solved_sums() -> tuple[Tensor, Tensor]:
    """Sums with their working, ids `[B, R]` padded to the right, and True `[B, R]` on tokens."""
    rng = random.Random("matched-noise")
    problems = [draw(rng, MAX_DIGITS, held_out=False) for _ in range(PROBLEMS)]
    rows = [[BOS, *(ID_OF[c] for c in problem.prompt + problem.solution(with_working=True))] for problem in problems]
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return ids, torch.arange(width) < torch.tensor([[len(row)] for row in rows])


if __name__ == "__main__":
    sys.exit(main())
