"""verl's `rollout_correction` and KL settings in our rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import NeedsDecisionError
from moe_trm.tools.translate.values import Rule, number, switch, text
from moe_trm.tools.translate.verl_keys import ACTOR

_SECTION = "algorithm.rollout_correction"
_WEIGH, _CAP, _REJECT, _BOUNDS, _BYPASS, _LOSS, _NORMALIZE = (
    f"{_SECTION}.{name}"
    for name in (
        "rollout_is",
        "rollout_is_threshold",
        "rollout_rs",
        "rollout_rs_threshold",
        "bypass_mode",
        "loss_type",
        "rollout_is_batch_normalize",
    )
)


def _correction(draft: Draft) -> None:
    """`rollout_is` weighs, `rollout_rs` rejects; both read proximal / rollout, with `bypass_mode` the total ratio."""
    weigh, reject = draft.take(_WEIGH), draft.take(_REJECT)
    bypass, loss = switch(draft, _BYPASS), text(draft, _LOSS)
    rules: list[dict[str, Any]] = []
    used = []
    if weigh not in (None, "token", "sequence"):
        raise NeedsDecisionError(_WEIGH, f"{weigh}: verl has token and sequence")
    if weigh and bypass and loss != "reinforce":
        draft.miss(_WEIGH, "no effect with bypass_mode and ppo_clip: the clipped ratio is the weight already")
    elif weigh:
        rules.append(_weighing(draft, weigh))
        used += [key for key in (_WEIGH, _CAP) if key in draft.settings]
    if reject is not None:
        rules += _rejecting_all(draft, reject)
        used += [_REJECT, _BOUNDS]
    if rules:
        for rule in rules:
            rule["thresholds"]["ratio"] = "total" if bypass else "merged"
        draft.put("correction.rules", rules, *used, *([_BYPASS] if _BYPASS in draft.settings else []))


def _normalized(draft: Draft) -> None:
    if not switch(draft, _NORMALIZE):
        return
    level, idle = draft.take(_WEIGH), switch(draft, _BYPASS) and text(draft, _LOSS) != "reinforce"
    if level in ("token", "sequence") and not idle:
        draft.put("correction.batch_normalize", level, _NORMALIZE)


def _weighing(draft: Draft, level: str) -> dict[str, Any]:
    """One number caps the weights; a band drops what lies outside, tokens or whole sequences."""
    value = draft.take(_CAP)
    parts = ("2.0" if value is None else str(value)).split("_")
    try:
        bounds = [float(part) for part in parts]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2):
        raise NeedsDecisionError(_CAP, f"{value}: neither a number nor low_high")
    if len(bounds) == 2:
        names = {"token": "icepop", "sequence": "seq_mis"}
        return {"name": names[level], "thresholds": {"low": bounds[0], "high": bounds[1]}}
    return {"name": "seq_tis" if level == "sequence" else "token_tis", "thresholds": {"cap": bounds[0]}}


def _rejecting_all(draft: Draft, modes: object) -> list[dict[str, Any]]:
    """Comma-joined modes with one threshold each, or one for all; a mode that is named twice counts once."""
    value = draft.take(_BOUNDS)
    thresholds = "" if value is None else str(value)
    names = list(dict.fromkeys(part.strip() for part in str(modes).split(",") if part.strip()))
    texts = [part.strip() for part in thresholds.split(",") if part.strip()]
    if len(texts) not in (1, len(names)):
        raise NeedsDecisionError(_REJECT, f"{len(texts)} thresholds for {len(names)} modes")
    rules = []
    for index, name in enumerate(names):
        bound = texts[index if len(texts) > 1 else 0]
        try:
            rules.append(_rejecting(name, bound))
        except ValueError as error:
            raise NeedsDecisionError(_REJECT, f"{bound} is no threshold of {name}") from error
        if name.endswith("k1") and "_" in bound:
            draft.remark(
                f"{name} tests the inverse ratio, as verl does: what stays has a ratio of 1/high to "
                "1/low; `orientation: ratio` in its thresholds tests the ratio itself"
            )
    return rules


def _rejecting(name: str, bound: str) -> dict[str, Any]:
    """k1 takes "low_high", or "high" for the band from 1 / high; k2 and k3 take one number. Raises `ValueError`."""
    if not re.fullmatch("(token|seq_sum|seq_mean)_k[123]|seq_max_k[23]", name):
        raise ValueError(name)
    numbers = [float(part) for part in bound.split("_")]
    if min(numbers) <= 0 or len(numbers) > (2 if name.endswith("k1") else 1):
        raise ValueError(bound)
    if not name.endswith("k1"):
        return {"name": name, "thresholds": {"upper": numbers[0]}}
    low, high = (1 / numbers[0], numbers[0]) if len(numbers) == 1 else numbers
    return {"name": name, "thresholds": {"low": low, "high": high}}


CORRECTION: Sequence[Rule] = (
    Rule(
        (_WEIGH, _CAP, _REJECT, _BOUNDS, _LOSS, _BYPASS),
        ("correction.rules",),
        _correction,
    ),
    Rule((_NORMALIZE,), ("correction.batch_normalize",), _normalized),
)


_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_estimator(key: str, name: str) -> str:
    """verl's (and TRL's) names of KL estimators in ours; `+` is the straight-through form in both."""
    estimator = _ESTIMATORS.get(name.removesuffix("+"))
    if estimator is None or (name.endswith("+") and estimator not in ("k1", "k3")):
        raise NeedsDecisionError(key, f"{name}: not an estimator of ours")
    return f"{estimator}+" if name.endswith("+") else estimator


_IN_LOSS, _COEF, _KIND = (f"{ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
_IN_REWARD, _PENALTY = "algorithm.use_kl_in_reward", "algorithm.kl_penalty"
_CONTROL = {name: f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "target_kl", "horizon")}


def _kl(draft: Draft) -> None:
    in_loss, in_reward = switch(draft, _IN_LOSS), switch(draft, _IN_REWARD)
    if in_loss and in_reward:
        raise NeedsDecisionError(_IN_REWARD, "the KL is either in the loss or in the reward here")
    if in_loss:
        coef = number(draft, _COEF)
        draft.put("kl.coef", 0.001 if coef is None else coef, _COEF, _IN_LOSS)
        draft.put("kl.where", "loss", _IN_LOSS)
        draft.put("kl.estimator", kl_estimator(_KIND, text(draft, _KIND) or "low_var_kl"), _KIND)
    elif in_reward:
        coef = number(draft, _CONTROL["kl_coef"])
        draft.put("kl.coef", 0.001 if coef is None else coef, _CONTROL["kl_coef"], _IN_REWARD)
        draft.put("kl.where", "reward", _IN_REWARD)
        draft.put("kl.estimator", kl_estimator(_PENALTY, text(draft, _PENALTY) or "kl"), _PENALTY)
        _controller(draft)


def _controller(draft: Draft) -> None:
    kind = text(draft, _CONTROL["type"]) or "fixed"
    if kind not in ("fixed", "adaptive"):
        raise NeedsDecisionError(_CONTROL["type"], f"{kind}: fixed or adaptive is expected")
    draft.put("kl.controller", kind, _CONTROL["type"])
    if kind == "adaptive":
        for theirs, ours in (("target_kl", "kl.target"), ("horizon", "kl.horizon")):
            value = number(draft, _CONTROL[theirs])
            if value is not None:
                draft.put(ours, value, _CONTROL[theirs])


KL: Sequence[Rule] = (
    Rule(
        (_IN_LOSS, _COEF, _KIND, _IN_REWARD, _PENALTY, *_CONTROL.values()),
        ("kl.coef", "kl.where", "kl.estimator", "kl.controller", "kl.target", "kl.horizon"),
        _kl,
    ),
)
