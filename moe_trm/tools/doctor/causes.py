"""Causes of a mismatch between two engines that should agree. Each leaves a trace of its own in the tokens.

Engines at the same weights, over the same tokens, differ by log-ratios x (learner minus rollout). Their size is the k3
estimate of the KL, mean(e^x - 1 - x). Their shape tells the cause:

- `mask`: x follows log(kept mass) of the rollout's own truncation, token by token: one side renormalised, the other did
  not.
- `temperature`: x follows log p + H. Dividing logits by T' instead of T moves a log-prob by (T/T' - 1)(log p + H) to
  first order.
- `positions`: the first tokens of a context agree, later ones do not: position encoding, attention or its cache.
- `expert`: contexts in which no token passed one expert of one layer agree, those in which one did differ.
- `routing`: with the learner's own routes the mismatch is much larger than with the rollout's, and routers flip often.
- `weights`: large, and none of these.
- `precision`: small, and none of these.
- `none`: as two engines of equal arithmetic agree.

Where the rollout rounds its weights on purpose, `quantization` stands for `routing`, `weights` and `precision`, because
it leaves their traces.

Shape letters: N tokens, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_trm.observe.advice.remedies import HALF_PRECISION
from moe_trm.step.probe.pooled import k3
from moe_trm.tools.doctor.measurements import Array, Measurements

Cause = Literal["none", "mask", "temperature", "positions", "expert", "routing", "weights", "precision", "quantization"]

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
WARMER = 0.005
"""Slope of the temperature's trace, about T / T' - 1, below which temperatures count as equal."""
CONTRAST = 20.0
"""Times that contexts must differ more with an expert than without it."""
ENOUGH = 20
"""Tokens of each kind that a comparison needs."""
EARLY, LATE = 2, 8
"""Tokens with at most so many before them are the start of a context, with at least so many its later part."""
CERTAIN = 1e-7
"""Tokens less surprising than this are certain to both engines (one kept id) and show nothing."""

ROUNDING = "The engines differ by rounding (k3 {native_k3:.1e}), of which replayed routes leave {replayed_k3:.1e}."

ROUNDED = (
    "The rollout's weights are rounded ({quantization}), so it is a policy of its own: k3 {native_k3:.1e} from the "
    "learner's, of which replayed routes leave {replayed_k3:.1e}. Other weights would look the same; correct for it, "
    "and watch that engine/k3_kl stays."
)


@dataclass(frozen=True)
class Finding:
    """The cause, in words, with the figures it rests on and the setting that acts on it (empty when none does)."""

    cause: Cause
    sentence: str
    figures: Mapping[str, float]
    config: str = ""


def find_cause(measurements: Measurements, quantization: str | None = None) -> Finding:
    """The most specific cause whose trace is there.

    `quantization`: the rounding of the rollout's weights, where it is on purpose.
    """
    figures = traces(measurements)
    matching = next(judgement for judgement in JUDGEMENTS if judgement.applies(figures))
    if quantization is not None and matching.cause in ("routing", "weights", "precision"):
        sentence = ROUNDED.format_map({**figures, "quantization": quantization})
        return Finding("quantization", sentence, figures)
    return Finding(matching.cause, matching.sentence.format_map(figures), figures, matching.config)


def traces(measurements: Measurements) -> dict[str, float]:
    """Every figure that a `Judgement` rests on.

    `native_k3`, `replayed_k3`, `flip_rate` (token-layers). `mask_explains` and `mask_slope`, `temperature_explains` and
    `temperature_slope`: share of the variance of x, and the factor. `early_over_late`: median of |x| at the start of a
    context over that later, of tokens that are not certain. `expert_contrast`: median of |x| where the context touched
    the expert, over the 95th percentile where it did not, for the expert with the largest; `expert_layer` and
    `expert_id` name it.
    """
    x = measurements.replayed
    mask_explains, mask_slope = _fit(x, measurements.full - measurements.rollout)
    temperature_explains, temperature_slope = _fit(x, measurements.full + measurements.entropy)
    uncertain = np.abs(measurements.rollout) > CERTAIN
    early, late = uncertain & (measurements.position <= EARLY), uncertain & (measurements.position >= LATE)
    return {
        "native_k3": float(k3(measurements.native).mean()),
        "replayed_k3": float(k3(x).mean()),
        "flip_rate": float(measurements.flipped_layers.mean()) / measurements.num_layers,
        "mask_explains": mask_explains,
        "mask_slope": mask_slope,
        "temperature_explains": temperature_explains,
        "temperature_slope": temperature_slope,
        "early_over_late": _over(np.abs(x[early]), np.abs(x[late])),
        **_worst_expert(np.abs(x[uncertain]), measurements.touched[uncertain]),
    }


@dataclass(frozen=True)
class Judgement:
    """A cause, the condition on the figures of `traces`, and its `sentence`: a format string over these figures."""

    cause: Cause
    applies: Callable[[Mapping[str, float]], bool]
    sentence: str
    config: str = ""


JUDGEMENTS = (
    Judgement("none", lambda it: it["native_k3"] < NOTHING, "Both engines agree to float32 rounding."),
    Judgement(
        "mask",
        lambda it: it["mask_explains"] >= EXPLAINED and 0.7 < it["mask_slope"] < 1.3,
        "The rollout renormalised its log-probs over the kept ids, the learner over the whole vocabulary: "
        "{mask_explains:.0%} of the mismatch is the kept mass.",
        "sampling_mask.mode=keep",
    ),
    Judgement(
        "temperature",
        lambda it: it["temperature_explains"] >= TEMPERATURE_EXPLAINED and it["temperature_slope"] >= WARMER,
        "The learner scores at a lower temperature than the rollout sampled at: "
        "that explains {temperature_explains:.0%} of the mismatch.",
        "rollout.temperature: the value that the rollout samples with",
    ),
    Judgement(
        "temperature",
        lambda it: it["temperature_explains"] >= TEMPERATURE_EXPLAINED and it["temperature_slope"] <= -WARMER,
        "The learner scores at a higher temperature than the rollout sampled at: "
        "that explains {temperature_explains:.0%} of the mismatch.",
        "rollout.temperature: the value that the rollout samples with",
    ),
    Judgement(
        "expert",
        lambda it: it["expert_contrast"] >= CONTRAST,
        "Contexts that never pass expert {expert_id:.0f} of MoE layer {expert_layer:.0f} (counted from 0) agree, those "
        "that do differ {expert_contrast:.0f} times as much: its weights are not the same on both sides.",
        "model.checkpoint: convert it again, and look at that expert's tensors",
    ),
    Judgement(
        "positions",
        lambda it: it["replayed_k3"] >= LARGE / 10 and it["early_over_late"] <= 0.25,
        "The engines agree at the start of a context and part later: "
        "position encoding (rope base or scaling), attention mask, or a stale prefix cache.",
        "model.checkpoint: compare rope_theta and rope_scaling of config.json on both sides",
    ),
    Judgement(
        "routing",
        lambda it: it["flip_rate"] >= OFTEN and it["replayed_k3"] <= 0.5 * it["native_k3"],
        "The routers disagree on {flip_rate:.0%} of token-layers, and most of the mismatch goes with their routes.",
        "replay.mode=R3",
    ),
    Judgement(
        "weights",
        lambda it: it["replayed_k3"] >= LARGE,
        "The engines differ everywhere, far beyond rounding: they do not hold the same weights.",
        "sync.verify=true",
    ),
    Judgement("precision", lambda it: it["replayed_k3"] > LARGE / 10, ROUNDING, HALF_PRECISION.config),
    Judgement("precision", lambda _: True, ROUNDING),
)
"""The first that applies is the cause: the more specific a trace, the earlier."""


def _fit(x: Array, by: Array) -> tuple[float, float]:
    """Share of the square of `x` that slope * `by` explains, and the slope. (0, 0) where nothing can explain it."""
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


def _worst_expert(size: Array, touched: Array) -> dict[str, float]:
    """The (layer, expert) that separates differing contexts from agreeing ones best.

    `size` is `[N]`, `touched` is `[N, L, E]`.
    """
    worst = {"expert_contrast": 0.0, "expert_layer": -1.0, "expert_id": -1.0}
    _, num_layers, num_experts = touched.shape
    for layer in range(num_layers):
        for expert in range(num_experts):
            inside = touched[:, layer, expert]
            if min(inside.sum(), (~inside).sum()) < ENOUGH:
                continue
            contrast = float(np.median(size[inside]) / max(float(np.quantile(size[~inside], 0.95)), CERTAIN))
            if contrast > worst["expert_contrast"]:
                worst = {"expert_contrast": contrast, "expert_layer": float(layer), "expert_id": float(expert)}
    return worst
