"""Configurations by name: every preset and every loss, each with a rule that rejects some of the doctored recording."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from moe_trm import corrections, losses
from moe_trm.methods.parameters import declared
from moe_trm.types import RolloutRecord
from routing import token_digest

REWARD = [f"task.reward={Path(__file__).with_name('reward.py')}:reward", "task.reward_processes=1"]
"""Overrides of every run here: with the task's own reward the small model earns too little for gradients."""
_EXAMPLE = Path(__file__).parents[3] / "examples" / "own_methods" / "methods.py"
OWN_METHODS = [
    f"correction.rules=[{{name: {_EXAMPLE}:negative_gap_mask, thresholds: {{max_gap: 0.05}}}}]",
    f"loss.name={_EXAMPLE}:leaky_clip",
]
"""The example's correction and loss; the doctored recording is off by more than that at some tokens."""
REJECTING = "correction.rules=[{name: trm_max, thresholds: {max_kl: 0.5}}]"
WEIGHS_ONLY = ("disabled", "decoupled_token_is", "decoupled_seq_is", "bypass_ppo_clip", "bypass_pg_is")
"""Presets without a rule that rejects: they never do."""

PARAMETERS = {
    "kl_cov": {"share": 0.2},
    # All candidates, so that the random choice plays no part in the comparison.
    "clip_cov": {"share": 1.0, "low": 0.0, "high": 100.0},
    "m2po_clip": {"budget": 0.001, "min_low": 0.0, "min_high": 0.0},
}


def preset_cases() -> dict[str, list[str]]:
    """Overrides of each preset."""
    return {f"preset-{name}": [f"correction.preset={name}"] for name in corrections.presets}


def loss_cases() -> dict[str, list[str]]:
    """Overrides of each loss."""
    return {f"loss-{name}": [REJECTING, *_loss(name)] for name in losses.names()}


def other_cases() -> dict[str, list[str]]:
    """Cases beyond presets and losses: a rule over the whole minibatch, normalised weights, methods of one's own."""
    m2po = "correction.rules=[{name: m2po, thresholds: {budget: 0.001}}]"
    return {
        "m2po": [m2po, "loss.name=unclipped"],
        "normalised": [
            "correction.preset=decoupled_token_icepop",
            "correction.batch_normalize=token",
            "advantage.name=rloo",
        ],
        "turns": [
            REJECTING,
            "loss.name=turn_ppo",
            "loss.parameters={turn_ratio: product, normalize: row}",
            "advantage.name=turn_grpo",
        ],
        "kpop": ["correction.rules=[{name: kpop, thresholds: {weight: ratio}}]"],
        "soft": [
            "correction.rules=[{name: trm_soft, thresholds: {max_score: 0.001}}, "
            "{name: trm_max, thresholds: {max_kl: 0.5}}]"
        ],
        "opob": [REJECTING, "advantage.name=opob"],
        "tokens": [REJECTING, "advantage.name=otb"],
        "own": OWN_METHODS,
    }


def all_cases() -> dict[str, list[str]]:
    return preset_cases() | loss_cases() | other_cases()


def _loss(name: str) -> list[str]:
    required, _ = declared(losses.get(name).function)
    parameters = dict.fromkeys(required, 0.1) | PARAMETERS.get(name, {})
    written = ", ".join(f"{key}: {value}" for key, value in parameters.items())
    return [f"loss.name={name}", *([f"loss.parameters={{{written}}}"] if written else [])]


def doctored(record: RolloutRecord) -> RolloutRecord:
    """The record of an engine that is off.

    It is far off at one token of every third row, and a little, without bias, at all tokens of another third.
    """
    rng = np.random.default_rng(record.sample_id)
    noise = np.zeros(record.num_sampled)
    if record.sample_id % 3 == 0:
        noise[rng.integers(record.num_sampled)] = -3.0
    elif record.sample_id % 3 == 1:
        drawn = rng.normal(0, 0.05, record.num_sampled)
        noise = drawn - drawn.mean()
    logprobs = (record.rollout_logprobs + noise, record.full_logprobs + noise)
    rollout, full = (values.astype(np.float32) for values in logprobs)
    return replace(record, rollout_logprobs=rollout, full_logprobs=full)


def stale(record: RolloutRecord) -> RolloutRecord:
    """The record as if it had been sampled one version earlier."""
    assert record.routes is not None
    unbound = replace(record.routes, token_digest=token_digest(record.tokens))
    return replace(record, versions=np.maximum(record.versions - 1, 0), routes=unbound).bound()
