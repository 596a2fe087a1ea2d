"""What sets two engines apart that should agree: each cause leaves a trace of its own in the tokens.

Engines at the same weights, over the same tokens, differ by log-ratios x (learner minus rollout). Their size is the k3 estimate of the
KL, mean(e^x - 1 - x). Their shape tells the cause:

- `mask`: x follows log(kept mass) of the rollout's own truncation, token by token: one side renormalised, the other did not.
- `temperature`: x follows log p + H. Dividing logits by T' instead of T moves a log-prob by (T/T' - 1)(log p + H) to first order.
- `positions`: the first tokens of a context agree, later ones do not: position encoding, attention or its cache.
- `expert`: tokens that pass one expert of one layer differ, the others hardly.
- `routing`: with the learner's own routes the mismatch is much larger than with the rollout's, and routers flip often.
- `weights`: large, and none of these.
- `precision`: small, and none of these.
- `none`: as two engines of equal arithmetic agree.

The order is that of how specific a trace is. Shape letters: N tokens, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_trm.doctor.evidence import Array, Evidence
from moe_trm.ratios import LOG_RATIO_LIMIT

Cause = Literal["none", "mask", "temperature", "positions", "expert", "routing", "weights", "precision"]

NOTHING = 1e-8
"""k3 below which engines agree as float32 engines do."""
LARGE = 3e-3
"""k3 above which rounding is no longer an explanation (bfloat16 leaves about 1e-4)."""
EXPLAINED = 0.6
"""Share of the variance that a trace must explain."""
TEMPERATURE_EXPLAINED = 0.4
"""The same of the temperature's trace, which is exact only to first order."""
OFTEN = 0.05
"""Share of token-layers that flip when a router is disturbed; rounding flips about 1%."""
EARLY, LATE = 2, 8
"""Tokens with at most so many before them are the start of a context, with at least so many its later part."""
CERTAIN = 1e-7
"""Tokens less surprising than this are certain to both engines (one kept id) and show nothing."""


@dataclass(frozen=True)
class Finding:
    """The cause, in words, with the figures it rests on and the setting that acts on it (empty when none does)."""

    cause: Cause
    sentence: str
    figures: Mapping[str, float]
    config: str = ""


def find_cause(evidence: Evidence) -> Finding:
    """The most specific cause whose trace is there."""
    figures = traces(evidence)
    if figures["native_k3"] < NOTHING:
        return Finding("none", "Both engines agree to float32 rounding.", figures)
    return next(found for judge in _JUDGES if (found := judge(figures)) is not None)


def traces(evidence: Evidence) -> dict[str, float]:
    """Every figure that a judgement rests on.

    `native_k3`, `replayed_k3`, `flip_rate` (token-layers); `mask_explains` and `mask_slope`, `temperature_explains` and `temperature_slope`
    (share of the variance of x, and the factor); `early_over_late` (median of |x| at the start of a context over that later, of tokens
    that are not certain); `expert_over_rest` and
    `expert_share` (k3 of the tokens of the worst expert over that of the others, and their share of the whole), with `expert_layer`, `expert_id`.
    """
    x = evidence.replayed
    mask_explains, mask_slope = _fit(x, evidence.full - evidence.rollout)
    temperature_explains, temperature_slope = _fit(x, evidence.full + evidence.entropy)
    uncertain = np.abs(evidence.rollout) > CERTAIN
    early, late = uncertain & (evidence.position <= EARLY), uncertain & (evidence.position >= LATE)
    k3 = _k3(x)
    return {
        "native_k3": float(_k3(evidence.native).mean()),
        "replayed_k3": float(k3.mean()),
        "flip_rate": float(evidence.flipped_layers.mean()) / evidence.num_layers,
        "mask_explains": mask_explains,
        "mask_slope": mask_slope,
        "temperature_explains": temperature_explains,
        "temperature_slope": temperature_slope,
        "early_over_late": _over(np.abs(x[early]), np.abs(x[late])),
        **_worst_expert(evidence, k3),
    }


def _mask(figures: Mapping[str, float]) -> Finding | None:
    if figures["mask_explains"] < EXPLAINED or not 0.7 < figures["mask_slope"] < 1.3:
        return None
    return Finding(
        "mask",
        f"The rollout renormalised its log-probs over the kept ids, the learner over the whole vocabulary: {figures['mask_explains']:.0%} of the mismatch is the kept mass.",
        figures,
        "sampling_mask.mode=keep",
    )


def _temperature(figures: Mapping[str, float]) -> Finding | None:
    slope = figures["temperature_slope"]
    if figures["temperature_explains"] < TEMPERATURE_EXPLAINED or abs(slope) < 0.005:
        return None
    return Finding(
        "temperature",
        f"The learner scores at a {'lower' if slope > 0 else 'higher'} temperature than the rollout sampled at: that explains {figures['temperature_explains']:.0%} of the mismatch.",
        figures,
        "rollout.temperature: the value that the rollout samples with",
    )


def _positions(figures: Mapping[str, float]) -> Finding | None:
    if figures["replayed_k3"] < LARGE or figures["early_over_late"] > 0.25:
        return None
    return Finding(
        "positions",
        "The engines agree at the start of a context and part later: position encoding (rope base or scaling), attention mask, or a stale prefix cache.",
        figures,
        "model.checkpoint: compare rope_theta and rope_scaling of config.json on both sides",
    )


def _expert(figures: Mapping[str, float]) -> Finding | None:
    if figures["expert_over_rest"] < 5 or figures["expert_share"] < 0.5 or figures["native_k3"] < LARGE / 10:
        return None
    where = f"expert {figures['expert_id']:.0f} of layer {figures['expert_layer']:.0f}"
    return Finding(
        "expert",
        f"Tokens that pass {where} differ {figures['expert_over_rest']:.0f} times as much as the others: its weights are not the same on both sides.",
        figures,
        "model.checkpoint: convert it again, and look at that expert's tensors",
    )


def _routing(figures: Mapping[str, float]) -> Finding | None:
    if figures["flip_rate"] < OFTEN or figures["replayed_k3"] > 0.5 * figures["native_k3"]:
        return None
    return Finding(
        "routing",
        f"The routers disagree on {figures['flip_rate']:.0%} of token-layers, and most of the mismatch goes with their routes.",
        figures,
        "replay.mode=R3",
    )


def _weights(figures: Mapping[str, float]) -> Finding | None:
    if figures["replayed_k3"] < LARGE:
        return None
    return Finding(
        "weights",
        "The engines differ everywhere, far beyond rounding: they do not hold the same weights.",
        figures,
        "sync.verify=true",
    )


def _precision(figures: Mapping[str, float]) -> Finding | None:
    return Finding(
        "precision",
        f"The engines differ by rounding (k3 {figures['native_k3']:.1e}), of which replayed routes leave {figures['replayed_k3']:.1e}.",
        figures,
        "rollout.server.dtype=float32" if figures["replayed_k3"] > LARGE / 10 else "",
    )


_JUDGES: tuple[Callable[[Mapping[str, float]], Finding | None], ...] = (
    _mask,
    _temperature,
    _positions,
    _expert,
    _routing,
    _weights,
    _precision,
)


def _k3(x: Array) -> Array:
    clipped = np.clip(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values: Array = np.expm1(clipped) - clipped
    return values


def _fit(x: Array, by: Array) -> tuple[float, float]:
    """Share of the square of `x` that slope * `by` explains, and the slope. (0, 0) where there is nothing to explain it by."""
    power, total = float(by @ by), float(x @ x)
    if power < 1e-12 or total == 0:
        return 0.0, 0.0
    slope = float(x @ by) / power
    return float(1 - ((x - slope * by) ** 2).sum() / total), slope


def _over(part: Array, rest: Array) -> float:
    """Median of `part` over median of `rest`; 1 where either is missing."""
    if len(part) == 0 or len(rest) == 0 or np.median(rest) == 0:
        return 1.0
    return float(np.median(part) / np.median(rest))


def _worst_expert(evidence: Evidence, k3: Array) -> dict[str, float]:
    """The (layer, expert) whose tokens stand out most, among those that at least 1% and at most half of the tokens pass."""
    worst = {"expert_over_rest": 1.0, "expert_share": 0.0, "expert_layer": -1.0, "expert_id": -1.0}
    total = float(k3.sum())
    for layer in range(evidence.num_layers):
        ids = evidence.experts[:, layer].astype(np.int64)
        counts = np.bincount(ids.ravel(), minlength=evidence.num_experts)
        sums = np.bincount(ids.ravel(), weights=np.repeat(k3, ids.shape[1]), minlength=evidence.num_experts)
        for expert in np.flatnonzero((counts >= max(8, 0.01 * len(k3))) & (counts <= 0.5 * len(k3))):
            rest = (total - sums[expert]) / (len(k3) - counts[expert])
            over = float(sums[expert] / counts[expert] / rest) if rest > 0 else float("inf")
            if over > worst["expert_over_rest"] and sums[expert] > 0.3 * total:
                worst = {
                    "expert_over_rest": over,
                    "expert_share": float(sums[expert]) / total,
                    "expert_layer": float(layer),
                    "expert_id": float(expert),
                }
    return worst
