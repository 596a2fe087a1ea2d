"""The job that `tests.drills.soak` runs where it is given none: a tiny random model that is rewarded for digits."""

from __future__ import annotations

import json
from pathlib import Path

from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from moe_trm.tasks.reward_input import RewardInput

SETTINGS = {
    "task": {"max_digits": 2, "eval_size": 16, "reward": "benchmarks.soak_job:share_of_digits"},
    "rollout": {
        "prompts_per_step": 4,
        "group_size": 4,
        "top_p": 0.95,
        "max_new_tokens": 16,
        "server": {"port": 0, "dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 32},
    },
    "replay": {"mode": "R3"},
    "probe": {"every": 10},
    "correction": {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 0.5}}, {"name": "token_tis"}]},
    "kl": {"coef": 0.001},
    "optimizer": {"lr": 1e-5},
    "learner": {"minibatches": 2, "micro_batch_rows": 4, "parallel": {"expert": 2}},
    "checkpoint": {"every": 25},
    "observe": {"transcripts": 50},
    "train": {"eval_every": 50, "export": False},
}
SHAPE = TinyShape(layers=2, hidden=64, heads=2, kv_heads=1, experts=8, expert_ffn=32)


def write_job(folder: Path) -> Path:
    """The model, the same each time, and a configuration that trains it on SGLang and two learner ranks."""
    make_checkpoint(folder / "model", shape=SHAPE)
    path = folder / "config.yaml"
    path.write_text(json.dumps(SETTINGS | {"model": {"checkpoint": str(folder / "model")}}), encoding="utf-8")
    return path


def share_of_digits(sample: RewardInput) -> float:
    """Reward that differs between the answers of a random model. It runs in its own processes, as any function does."""
    return sum(character.isdigit() for character in sample.completion) / max(1, len(sample.completion))
