"""verl's `rollout_correction` and KL settings in our rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from moe_trm.config.translate.draft import Draft

_CORRECTION = "algorithm.rollout_correction"
_ACTOR = "actor_rollout_ref.actor"


def correction(draft: Draft, take: Callable[[str], Any]) -> None:
    """`rollout_is` weighs, `rollout_rs` rejects; both read proximal / rollout, with `bypass_mode` the total ratio."""
    weigh, cap = take(f"{_CORRECTION}.rollout_is"), take(f"{_CORRECTION}.rollout_is_threshold")
    reject, bounds = take(f"{_CORRECTION}.rollout_rs"), take(f"{_CORRECTION}.rollout_rs_threshold")
    bypass, loss = take(f"{_CORRECTION}.bypass_mode"), take(f"{_CORRECTION}.loss_type")
    rules: list[dict[str, Any]] = []
    if weigh and bypass and loss != "reinforce":
        draft.remark("rollout_is has no effect with bypass_mode and ppo_clip: the clipped ratio is the weight already")
    elif weigh:
        rules.append(_weighing(weigh, 2.0 if cap is None else cap))
    if reject:
        try:
            rejections = _rejections(str(reject), "" if bounds is None else str(bounds))
        except ValueError as error:
            draft.miss(f"{_CORRECTION}.rollout_rs", str(error))
        else:
            rules += rejections
            for rule in rejections:
                if rule["name"].endswith("k1") and "_" in str(bounds):
                    draft.remark(
                        f"{rule['name']} tests the inverse ratio, as verl does: what stays has a ratio of 1/high to "
                        "1/low; `orientation: ratio` in its thresholds tests the ratio itself"
                    )
    for rule in rules:
        rule["thresholds"]["ratio"] = "total" if bypass else "merged"
    if bypass:
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


def _rejections(modes: str, thresholds: str) -> list[dict[str, Any]]:
    """Comma-joined modes with one threshold each, or one for all; a mode that is named twice counts once.

    k1 takes "low_high", or "high" for the band from 1 / high; k2 and k3 take one number. Raises `ValueError` with the
    part that does not fit.
    """
    names = list(dict.fromkeys(part.strip() for part in modes.split(",") if part.strip()))
    texts = [part.strip() for part in thresholds.split(",") if part.strip()]
    if len(texts) not in (1, len(names)):
        raise ValueError(f"{len(texts)} thresholds for {len(names)} modes")
    return [_rejecting(name, texts[index if len(texts) > 1 else 0]) for index, name in enumerate(names)]


def _rejecting(name: str, text: str) -> dict[str, Any]:
    if not re.fullmatch("(token|seq_sum|seq_mean)_k[123]|seq_max_k[23]", name):
        raise ValueError(f"there is no mode {name}")
    numbers = [float(part) for part in text.split("_")]
    if min(numbers) <= 0 or len(numbers) > (2 if name.endswith("k1") else 1):
        raise ValueError(f"{text} is no threshold of {name}")
    if not name.endswith("k1"):
        return {"name": name, "thresholds": {"upper": numbers[0]}}
    low, high = (1 / numbers[0], numbers[0]) if len(numbers) == 1 else numbers
    return {"name": name, "thresholds": {"low": low, "high": high}}


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
