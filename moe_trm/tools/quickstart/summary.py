"""Results of a finished run: its metrics, and the mismatch with and without replay, pooled over probe steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson

from moe_trm.step.probe.pooled import Interval, PooledTokens, load, pooled


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The steps of `metrics.jsonl`, in order."""
    return [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def pooled_mismatch(runs: Sequence[Path], num_layers: int) -> dict[str, Interval]:
    """The probe tokens of all runs pooled: `probe.pooled.pooled`, and `tokens` and `prompts` counted."""
    tokens = _together([load(run / "probe") for run in runs])
    counts = {"tokens": len(tokens.native), "prompts": len(np.unique(tokens.group))}
    return {name: Interval(n, n, n) for name, n in counts.items()} | pooled(tokens, num_layers=num_layers)


def print_mismatch(figures: Mapping[str, Interval]) -> None:
    """The same bfloat16 rollouts scored with the learner's own routes and with the rollout's."""
    tokens, prompts = int(figures["tokens"].value), int(figures["prompts"].value)
    print(
        f"\nEngine mismatch at equal weights: {tokens} tokens of {prompts} prompts, 95% bootstrap intervals over "
        "prompts"
    )
    print(
        f"  expert sets differ on {_percent(figures['layer_flip_rate'])} of token-layers, "
        f"{_percent(figures['token_flip_rate'])} of tokens"
    )
    print(f"  {'k3 KL, nats':<16}{'own routes (none)':>32}{'replayed routes (R3)':>32}{'times less':>26}")
    for subset in ("all", "flipped"):
        if f"{subset}/native_k3" in figures:
            row = [str(figures[f"{subset}/{name}"]) for name in ("native_k3", "replayed_k3", "k3_reduction")]
            print(f"  {subset + ' tokens':<16}{row[0]:>32}{row[1]:>32}{row[2]:>26}")


def _percent(interval: Interval) -> str:
    return f"{interval.value:.2%} [{interval.low:.2%}, {interval.high:.2%}]"


def _together(parts: Sequence[PooledTokens]) -> PooledTokens:
    """Several runs as one; prompts of different runs stay apart."""
    shifted, used = [], 0
    for part in parts:
        shifted.append(replace(part, group=part.group + used))
        used += int(part.group.max()) + 1
    names = ("group", "native", "replayed", "flipped_layers")
    return PooledTokens(**{name: np.concatenate([getattr(part, name) for part in shifted]) for name in names})
