"""Run directories for the report's tests: written by the real sink, with a bit of everything that can happen."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from moe_trm.config.schema import Config
from moe_trm.observe.sinks import JsonLines


def metrics_of(step: int) -> dict[str, float | str]:
    """Metrics of one step, deterministic, with awkward floating-point values."""
    wave = math.sin(step) / 3
    row: dict[str, float | str] = {
        "reward/mean": 0.5 + wave,
        "response/length_mean": 17 + wave,
        "engine/k3_kl": 1e-5 * math.exp(wave),
        "staleness/k3_kl": 0.0 if step == 3 else 1e-4 * math.exp(-wave),
        "total/k3_kl": math.nan if step == 4 else 1.1e-4,
        "correction/kept_fraction": 1 - wave**2 / 10,
        "correction/trm_max/kept_fraction": 1 - wave**2 / 12,
        "replay/applied_fraction": 1.0,
        "update/first_nonzero_fraction": 0.0,
        "routing/local_flip_rate": 0.01,
        "routing/load_entropy": 0.8 + wave / 10,
        "acceptance/length_1_16": 1.0,
        "acceptance/length_17_64": 0.9 + wave / 10,
        "sampling_mask/size_median": 2.0,
        "rollout/age_mean": 0.0,
        "ledger/issued": 16.0 * step,
        "ledger/trained": 16.0 * step - (1 if step > 2 else 0),
        "ledger/rejected": 1.0 if step > 2 else 0.0,
        **{f"ledger/{place}": 0.0 for place in ("queued", "in_flight", "dropped")},
        **{f"time/{phase}_s": 0.1 * (place + 1) + wave / 50 for place, phase in enumerate(("wait", "score", "update"))},
        "time/step_s": 0.7,
        **{f"routing/local_flip_rate/layer_{layer}": 0.001 * layer + abs(wave) / 100 for layer in range(12)},
        "verdict": "All is well.",
        "verdict/case": "ok",
    }
    if step > 2:
        row["records/rejected/nan_logprob"] = 1.0
    if step % 2 == 0:
        row |= {f"routing/flips/engine/layer_{layer}": 0.002 * layer for layer in range(12)}
        row |= {"probe/numerics_abs_mean": 5e-4, "probe/routing_abs_mean": 2e-4, "eval/accuracy": 0.1 * step}
    if step in (5, 6):
        row |= {"verdict": "They <disagree>.", "verdict/case": "precision", "verdict/config": "replay.mode=R3"}
    return row


def make_run(folder: Path, *, steps: int = 8, done: int | None = None, **settings: object) -> Path:
    """A run directory with `done` of `steps` steps (default: all); `settings` are sections of its configuration."""
    folder.mkdir(parents=True)
    config: Mapping[str, object] = {
        "name": folder.name,
        "model": {"checkpoint": "a/model"},
        "train": {"steps": steps},
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(Config.model_validate(config).dump()))
    sink = JsonLines(folder / "metrics.jsonl")
    sink.write(0, {"eval/accuracy": 0.125})
    for step in range(1, (steps if done is None else done) + 1):
        sink.write(step, metrics_of(step))
    sink.close()
    return folder
