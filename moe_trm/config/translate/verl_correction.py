"""What verl does about the mismatch and the distance to the reference, in our rules: `rollout_correction` and its KL settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_trm.config.translate.draft import Draft

_CORRECTION = "algorithm.rollout_correction"
_ACTOR = "actor_rollout_ref.actor"


def correction(draft: Draft, take: Callable[[str], Any]) -> None:
    """`rollout_is` weighs, `rollout_rs` rejects, `bypass_mode` makes both read the total ratio."""
    weigh, cap = take(f"{_CORRECTION}.rollout_is"), take(f"{_CORRECTION}.rollout_is_threshold")
    reject, bounds = take(f"{_CORRECTION}.rollout_rs"), take(f"{_CORRECTION}.rollout_rs_threshold")
    bypass, loss = take(f"{_CORRECTION}.bypass_mode"), take(f"{_CORRECTION}.loss_type")
    rules = []
    if weigh:
        rules.append(_weighing(weigh, 2.0 if cap is None else cap))
    names = [name.strip() for name in str(reject).split(",")] if reject else []
    values = [text.strip() for text in str(bounds).split(",")] if bounds is not None else []
    for index, name in enumerate(names):
        if not values:
            draft.miss(f"{_CORRECTION}.rollout_rs", f"{name} without a threshold")
            continue
        rules.append(_rejecting(name, values[min(index, len(values) - 1)]))
        if name.startswith("token_k1"):
            draft.remark(
                f"{name} keeps ratios inside its band here; verl (as of January 2026) keeps the mirrored band, the inverse ratios"
            )
    if bypass:
        for rule in rules:
            rule["thresholds"]["ratio"] = "total"
        draft.put("loss.name", "reinforce" if loss == "reinforce" else "ppo_clip", f"{_CORRECTION}.loss_type")
        draft.put("loss.parameters", {} if loss == "reinforce" else {"ratio": "total"}, f"{_CORRECTION}.bypass_mode")
    if rules:
        draft.put("correction.rules", rules, _CORRECTION)
    if take(f"{_CORRECTION}.rollout_is_batch_normalize"):
        level = "sequence" if weigh == "sequence" else "token"
        draft.put("correction.batch_normalize", level, f"{_CORRECTION}.rollout_is_batch_normalize")


def _weighing(level: str, cap: float | str) -> dict[str, Any]:
    low, _, high = str(cap).rpartition("_")
    if low:
        return {"name": "icepop", "thresholds": {"low": float(low), "high": float(high)}}
    return {"name": "seq_tis" if level == "sequence" else "token_tis", "thresholds": {"cap": float(cap)}}


def _rejecting(name: str, bound: str) -> dict[str, Any]:
    low, _, high = bound.rpartition("_")
    if name.endswith("k1"):
        return {"name": name, "thresholds": {"low": float(low) if low else 1 / float(high), "high": float(high)}}
    return {"name": name, "thresholds": {"upper": float(high)}}


_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_estimator(name: str) -> str | None:
    """verl's (and TRL's) names of KL estimators in ours; `+` is the straight-through form in both."""
    straight = name.endswith("+")
    known = _ESTIMATORS.get(name.removesuffix("+"))
    return f"{known}+" if straight and known in ("k1", "k3") else known


def kl(draft: Draft, take: Callable[[str], Any]) -> None:
    coef, kind = take(f"{_ACTOR}.kl_loss_coef"), take(f"{_ACTOR}.kl_loss_type") or "low_var_kl"
    if take(f"{_ACTOR}.use_kl_loss"):
        draft.put("kl.coef", 0.001 if coef is None else coef, f"{_ACTOR}.kl_loss_coef")
        draft.put("kl.estimator", kl_estimator(kind), f"{_ACTOR}.kl_loss_type")
    control = {key: take(f"algorithm.kl_ctrl.{key}") for key in ("type", "kl_coef", "target_kl", "horizon")}
    penalty = take("algorithm.kl_penalty") or "kl"
    if take("algorithm.use_kl_in_reward"):
        if "kl.coef" in draft.values:
            draft.miss(
                "algorithm.use_kl_in_reward", "the KL is either in the loss or in the reward; it stays in the loss"
            )
            return
        draft.put("kl.where", "reward", "algorithm.use_kl_in_reward")
        draft.put("kl.coef", control["kl_coef"] or 0.001, "algorithm.kl_ctrl.kl_coef")
        draft.put("kl.estimator", kl_estimator(penalty), "algorithm.kl_penalty")
        if control["type"] == "adaptive":
            draft.put("kl.controller", "adaptive", "algorithm.kl_ctrl.type")
            draft.put("kl.target", control["target_kl"], "algorithm.kl_ctrl.target_kl")
            draft.put("kl.horizon", control["horizon"], "algorithm.kl_ctrl.horizon")
