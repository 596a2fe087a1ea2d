"""From metrics to one sentence: the fault, the figures that show it, and the setting that acts on it.

The engine ratio is measured between two engines at the same weights. So numerics and staleness are separated without
another experiment. Thresholds are the field's (verl's guide to rollout correction). `RISING_STEPS`, `PPL_TOLERANCE` and
the two-standard-error rule are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Case = Literal["ok", "precision", "staleness", "variance", "drift", "clipping", "length", "unclear"]

RISING_STEPS = 20
PPL_TOLERANCE = 0.05
LENGTH_SURGE = 1.2
LENGTH_WINDOW = 100


@dataclass(frozen=True)
class Verdict:
    """Judgement of a run's metrics.

    Attributes:
        case: the first case of the decision tree that holds.
        sentence: the case in words.
        evidence: the metrics it rests on.
        config: the setting that acts on it, as typed on the command line; empty when nothing should change.
    """

    case: Case
    sentence: str
    evidence: Mapping[str, float]
    config: str


def verdict(history: Sequence[Mapping[str, float]], *, length_key: str = "response/length_mean") -> Verdict:
    """Judge the latest of `history` (finished metrics of each step, oldest first).

    The order is precision, staleness, variance, drift, clipping, length. A step is not judged on a metric that it did
    not measure. The result is `unclear` if the mismatch was not measured at all.

    Mismatch is read from `k3_kl`, which estimates the same KL as `kl` but is never negative.
    """
    seen: Mapping[str, float] = history[-1] if history else {}
    if "engine/k3_kl" not in seen:
        return Verdict("unclear", "The engine mismatch was not measured, so nothing can be said.", {}, "")
    for judge in (_precision, _staleness, _variance, _drift):
        found = judge(seen)
        if found:
            return found
    return _clipping(history) or _length(history, length_key) or _calm(seen)


def escalation(chi2_token: float, masked_fraction: float, eff_sample_size: float, probs_pearson: float) -> str:
    """Correction needed: `rejection`, `rejection and token_tis`, or `systems` (repair the engines instead).

    systems: more than 25% masked, effective sample size below 0.3, Pearson below 0.95, or chi2 above 4. rejection and
    token_tis: chi2 above 2, or at least 10% masked. rejection: all else. Source: ours, after the field's health ranges.
    """
    if masked_fraction > 0.25 or eff_sample_size < 0.3 or probs_pearson < 0.95 or chi2_token > 4:
        return "systems"
    return "rejection and token_tis" if chi2_token > 2 or masked_fraction >= 0.1 else "rejection"


def mask_hides_gap(history: Sequence[Mapping[str, float]]) -> Verdict | None:
    """Alarm for a correction that rejects ever less while the mismatch grows: its threshold no longer measures it."""
    kept, gap = _series(history, "correction/kept_fraction"), _series(history, "total/k3_kl")
    if not (rising(kept) and rising(gap)):
        return None
    evidence = {"correction/kept_fraction": kept[-1], "total/k3_kl": gap[-1]}
    sentence = (
        f"Fewer tokens are rejected (kept {kept[-1]:.3f}) while the mismatch grows (k3 {gap[-1]:.2g}): the threshold "
        "no longer sees it."
    )
    return Verdict("drift", sentence, evidence, "correction.rules=[{name: trm_max, target_reject_rate: 0.05}]")


def rising(series: Sequence[float]) -> bool:
    """True when the last `RISING_STEPS` values have a least-squares slope more than two standard errors above 0."""
    values = [value for value in series[-RISING_STEPS:] if math.isfinite(value)]
    n = len(values)
    if n < 5:
        return False
    center, average = (n - 1) / 2, math.fsum(values) / n
    spread = math.fsum((i - center) ** 2 for i in range(n))
    slope = math.fsum((i - center) * (v - average) for i, v in enumerate(values)) / spread
    residual = math.fsum((v - average - slope * (i - center)) ** 2 for i, v in enumerate(values))
    return slope > 2 * math.sqrt(residual / (n - 2) / spread)


def _precision(seen: Mapping[str, float]) -> Verdict | None:
    evidence = _pick(seen, "engine/k3_kl", "engine/probs_pearson", "engine/ppl_ratio")
    bad = (
        evidence["engine/k3_kl"] > 0.05
        or evidence.get("engine/probs_pearson", 1.0) < 0.95
        or abs(evidence.get("engine/ppl_ratio", 1.0) - 1) > PPL_TOLERANCE
    )
    if not bad:
        return None
    routed = _pick(seen, "probe/native_k3_kl", "probe/replayed_k3_kl")
    by_routes = len(routed) == 2 and routed["probe/replayed_k3_kl"] < 0.5 * routed["probe/native_k3_kl"]
    sentence = f"The two engines disagree at the same weights (k3 {evidence['engine/k3_kl']:.2g})"
    if by_routes:
        return Verdict(
            "precision",
            f"{sentence}, mostly because their routers choose other experts.",
            evidence | routed,
            "replay.mode=R3",
        )
    return Verdict(
        "precision",
        f"{sentence}: align precision and kernels before any correction.",
        evidence | routed,
        "rollout.server.dtype=float32",
    )


def _staleness(seen: Mapping[str, float]) -> Verdict | None:
    evidence = _pick(seen, "staleness/k3_kl", "engine/k3_kl", "total/k3_kl")
    stale = evidence.get("staleness/k3_kl", 0.0)
    if stale <= 0.05 or stale <= evidence["engine/k3_kl"]:
        return None
    sentence = (
        f"The policy has moved away from the samples it trains on (staleness k3 {stale:.2g}, engine "
        f"{evidence['engine/k3_kl']:.2g})."
    )
    return Verdict("staleness", sentence, evidence, "learner.minibatches=1")


def _variance(seen: Mapping[str, float]) -> Verdict | None:
    evidence = _pick(seen, "total/rollout_is_eff_sample_size", "total/chi2_token", "total/chi2_seq")
    size, chi2 = evidence.get("total/rollout_is_eff_sample_size", 1.0), evidence.get("total/chi2_token", 0.0)
    if size >= 0.5 and chi2 <= 1:
        return None
    sentence = f"A few tokens dominate the importance weights (effective sample size {size:.2f}, chi2 {chi2:.2g})."
    return Verdict(
        "variance", sentence, evidence, "correction.rules=[{name: icepop, thresholds: {low: 0.5, high: 5.0}}]"
    )


def _drift(seen: Mapping[str, float]) -> Verdict | None:
    evidence = _pick(seen, "total/chi2_token", "total/rollout_is_eff_sample_size")
    if evidence.get("total/chi2_token", 0.0) <= 0.3:
        return None
    sentence = (
        f"The policies drift apart moderately (chi2 {evidence['total/chi2_token']:.2g}) with weights still in order."
    )
    return Verdict(
        "drift", sentence, evidence, "correction.rules=[{name: geometric_mask, thresholds: {low: 0.99, high: 1.01}}]"
    )


def _clipping(history: Sequence[Mapping[str, float]]) -> Verdict | None:
    clipped = _series(history, "loss/pg_clipfrac")
    if not clipped or clipped[-1] <= 0.2 or not rising(clipped):
        return None
    sentence = f"The clip cuts more and more of the gradient ({clipped[-1]:.0%} of tokens)."
    return Verdict("clipping", sentence, {"loss/pg_clipfrac": clipped[-1]}, "learner.minibatches=1")


def _length(history: Sequence[Mapping[str, float]], key: str) -> Verdict | None:
    if len(history) <= LENGTH_WINDOW or key not in history[-1] or key not in history[-1 - LENGTH_WINDOW]:
        return None
    now, before = history[-1][key], history[-1 - LENGTH_WINDOW][key]
    if before <= 0 or now / before <= LENGTH_SURGE:
        return None
    sentence = f"Answers grew by {now / before - 1:.0%} in {LENGTH_WINDOW} steps, which amplifies every mismatch."
    return Verdict("length", sentence, {key: now}, _half_lr(history[-1]))


def _half_lr(seen: Mapping[str, float]) -> str:
    lr = seen.get("optimizer/lr", 0.0)
    return f"optimizer.lr={lr / 2:g}" if lr > 0 else "optimizer.lr: half of what it is"


def _calm(seen: Mapping[str, float]) -> Verdict:
    evidence = _pick(
        seen, "engine/k3_kl", "engine/probs_pearson", "engine/ppl_ratio", "total/k3_kl", "total/chi2_token"
    )
    healthy = (
        evidence["engine/k3_kl"] < 0.02
        and evidence.get("engine/probs_pearson", 1.0) >= 0.99
        and abs(evidence.get("engine/ppl_ratio", 1.0) - 1) < 0.01
    )
    state = "healthy" if healthy else "tolerable, not yet healthy"
    return Verdict(
        "ok",
        f"The mismatch is {state} (engine k3 {evidence['engine/k3_kl']:.2g}); nothing needs to change.",
        evidence,
        "",
    )


def _pick(seen: Mapping[str, float], *names: str) -> dict[str, float]:
    return {name: seen[name] for name in names if name in seen}


def _series(history: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [step[name] for step in history if name in step]
