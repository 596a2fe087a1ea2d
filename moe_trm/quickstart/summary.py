"""What a finished run measured: its metrics, and the mismatch with and without replayed routes, pooled over probe steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson

from moe_trm.diagnostics.probe import ProbeTokens, load, pooled


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The steps of `metrics.jsonl`, in order."""
    return [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def print_probe(runs: Sequence[Path], num_layers: int) -> None:
    """The same bfloat16 rollouts scored with the learner's own routes and with the rollout's, pooled over all runs."""
    tokens = _together([load(run / "probe") for run in runs])
    figures = pooled(tokens, num_layers=num_layers)
    print(
        f"\nEngine mismatch at equal weights, {len(tokens.native)} tokens of {len(np.unique(tokens.group))} prompts, 95% bootstrap intervals:"
    )
    print(
        f"  expert sets that differ: {figures['layer_flip_rate']} of token-layers, {figures['token_flip_rate']} of tokens"
    )
    print(f"  {'k3 KL, nats':<16}{'own routes (none)':>32}{'replayed routes (R3)':>32}{'reduction':>26}")
    for subset, label in (("all", "all tokens"), ("flipped", "flipped tokens")):
        if f"{subset}/native_k3" in figures:
            row = [str(figures[f"{subset}/{name}"]) for name in ("native_k3", "replayed_k3", "k3_reduction")]
            print(f"  {label:<16}{row[0]:>32}{row[1]:>32}{row[2] + ' x':>26}")


def _together(parts: Sequence[ProbeTokens]) -> ProbeTokens:
    """Several runs as one; prompts of different runs stay apart."""
    shifted, used = [], 0
    for part in parts:
        shifted.append(replace(part, group=part.group + used))
        used += int(part.group.max()) + 1
    names = ("group", "native", "replayed", "flipped_layers")
    return ProbeTokens(**{name: np.concatenate([getattr(part, name) for part in shifted]) for name in names})
