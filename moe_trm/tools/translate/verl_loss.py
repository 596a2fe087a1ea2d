"""verl's policy losses in ours: each takes its own parameters, and some fix the aggregation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import NeedsDecisionError
from moe_trm.tools.translate.values import Rule, integer, number, switch, text
from moe_trm.tools.translate.verl_keys import ACTOR

_MODE = f"{ACTOR}.policy_loss.loss_mode"
_LOW, _HIGH, _DUAL = (f"{ACTOR}.clip_ratio_{name}" for name in ("low", "high", "c"))
_AGGREGATION = f"{ACTOR}.loss_agg_mode"
_BYPASS, _BYPASS_LOSS = (f"algorithm.rollout_correction.{name}" for name in ("bypass_mode", "loss_type"))


@dataclass(frozen=True)
class _Loss:
    """One of verl's losses in our words.

    Attributes:
        name: of our loss.
        settings: our keys by verl's.
        parameters: names in `loss.parameters` by verl's keys.
        aggregation: the one that verl uses whatever `loss_agg_mode` says; empty where it is heard.
        ratio: in `loss.parameters`, where verl's loss reads another ratio than ours.
    """

    name: str
    settings: Mapping[str, str] | None = None
    parameters: Mapping[str, str] | None = None
    aggregation: str = ""
    ratio: str = ""


_CLIP = {_LOW: "loss.clip_low", _HIGH: "loss.clip_high"}
_BOUNDS = {_LOW: "bound_low", _HIGH: "bound_high", _DUAL: "cap"}
_POLICY = f"{ACTOR}.policy_loss"
_ROWS = "seq-mean-token-mean"
_LOSSES: Mapping[str, _Loss] = {
    "vanilla": _Loss("ppo_clip", {**_CLIP, _DUAL: "loss.dual_clip"}),
    "gspo": _Loss("gspo_token", _CLIP, aggregation=_ROWS),
    "sapo": _Loss(
        "sapo",
        parameters={f"{ACTOR}.tau_pos": "tau_positive", f"{ACTOR}.tau_neg": "tau_negative"},
        aggregation=_ROWS,
    ),
    "gpg": _Loss("gpg"),
    "clip_cov": _Loss(
        "clip_cov",
        _CLIP,
        {f"{_POLICY}.clip_cov_ratio": "share", f"{_POLICY}.clip_cov_lb": "low", f"{_POLICY}.clip_cov_ub": "high"},
    ),
    "kl_cov": _Loss("kl_cov", parameters={f"{_POLICY}.kl_cov_ratio": "share", f"{_POLICY}.ppo_kl_coef": "beta"}),
    "geo_mean": _Loss("gmpo", aggregation=_ROWS),
    "cispo": _Loss("cispo", _CLIP),
    "dppo_tv": _Loss("dppo_tv", parameters=_BOUNDS, ratio="update"),
    "dppo_kl": _Loss("dppo_kl", parameters=_BOUNDS, ratio="update"),
    "dro": _Loss("dro", parameters={f"{_POLICY}.dro_beta": "beta"}),
}
_BYPASS_LOSSES = {
    "ppo_clip": _Loss("ppo_clip", _LOSSES["vanilla"].settings, ratio="total"),
    "reinforce": _Loss("reinforce"),
}

_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def _loss(draft: Draft) -> None:
    bypass = switch(draft, _BYPASS)
    key = _BYPASS_LOSS if bypass else _MODE
    losses = _BYPASS_LOSSES if bypass else _LOSSES
    mode = text(draft, key) or ""
    if mode not in losses:
        raise NeedsDecisionError(key, f"{mode}: not a loss of ours; `moe-trm config explain loss.name` has them")
    loss = losses[mode]
    draft.put("loss.name", loss.name, *([_BYPASS, key] if bypass else [key]))
    if bypass:
        draft.miss(_MODE, "verl does not read it with bypass_mode")
    for theirs, ours in (loss.settings or {}).items():
        draft.read(ours, number, theirs)
    if loss.name == "cispo":
        without_lower_bound(draft, _LOW)
    _parameters(draft, loss, mode)
    if f"{ACTOR}.clip_ratio" in draft.settings:
        draft.miss(f"{ACTOR}.clip_ratio", "verl reads clip_ratio_low and clip_ratio_high, which its defaults set")
    for theirs in (_LOW, _HIGH, _DUAL):
        if theirs in draft.settings and not draft.accounted(theirs):
            draft.miss(theirs, f"verl's loss {mode} does not read it")


def without_lower_bound(draft: Draft, key: str) -> None:
    """CISPO with a bound of 1 or more has none. Ours has none unless `loss.clip_low` is given."""
    value = draft.values.get("loss.clip_low")
    if isinstance(value, (int, float)) and value >= 1:
        del draft.values["loss.clip_low"], draft.origins["loss.clip_low"]
        draft.translated.pop(key, None)
        draft.miss(key, "1 or more: no lower bound, as ours without loss.clip_low")


def _parameters(draft: Draft, loss: _Loss, mode: str) -> None:
    parameters: dict[str, Any] = {}
    used = []
    for theirs, name in (loss.parameters or {}).items():
        value = number(draft, theirs)
        if value is None:
            raise NeedsDecisionError(theirs, f"verl's loss {mode} needs it")
        parameters[name] = float(value)
        used.append(theirs)
    if loss.name == "gmpo":
        low, high = number(draft, _LOW), number(draft, _HIGH)
        parameters |= {"log_clip_low": float(low or 0.0), "log_clip_high": float(high or 0.0)}
        used += [_LOW, _HIGH]
    if loss.ratio:
        parameters["ratio"] = loss.ratio
        used.append(_BYPASS if loss.ratio == "total" else _MODE)
    if parameters:
        draft.put("loss.parameters", parameters, *used)


def _aggregation(draft: Draft) -> None:
    bypass, mode = switch(draft, _BYPASS), text(draft, _MODE) or ""
    fixed = "" if bypass or mode not in _LOSSES else _LOSSES[mode].aggregation
    if fixed:
        aggregation = text(draft, _AGGREGATION)
        if mode == "gspo" and aggregation != fixed:
            reason = f"{aggregation}: verl 0.9.1 takes it for gspo, 0.10.0.dev takes {fixed} whatever it says"
            raise NeedsDecisionError(_AGGREGATION, reason)
        draft.put("loss.aggregation", fixed, _MODE)
        draft.miss(_AGGREGATION, f"verl's loss {mode} does not read it: it is always {fixed}")
        return
    aggregation = text(draft, _AGGREGATION)
    if aggregation not in _AGGREGATIONS:
        raise NeedsDecisionError(_AGGREGATION, f"{aggregation}: ours are {', '.join(_AGGREGATIONS)}")
    factor, length = integer(draft, f"{ACTOR}.loss_scale_factor"), integer(draft, "data.max_response_length")
    if aggregation == "seq-mean-token-sum-norm" and factor not in (None, length):
        raise NeedsDecisionError(f"{ACTOR}.loss_scale_factor", "the divisor here is rollout.max_new_tokens")
    draft.put("loss.aggregation", aggregation, _AGGREGATION)


LOSS: Sequence[Rule] = (
    Rule(
        (_MODE, _LOW, _HIGH, _DUAL, *(key for loss in _LOSSES.values() for key in loss.parameters or {})),
        ("loss.name", "loss.clip_low", "loss.clip_high", "loss.dual_clip", "loss.parameters"),
        _loss,
    ),
    Rule((_AGGREGATION, f"{ACTOR}.loss_scale_factor"), ("loss.aggregation",), _aggregation),
)
