"""slime's replay, corrections and KL in our rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import NeedsDecisionError
from moe_trm.tools.translate.values import Rule
from moe_trm.tools.translate.verl_correction import kl_estimator
from moe_trm.tools.translate.words import number, on, word


def _replay(draft: Draft) -> None:
    rollout, from_learner = on(draft, "use-rollout-routing-replay"), on(draft, "use-routing-replay")
    if rollout:
        draft.put("replay.mode", "R3", "use-rollout-routing-replay")
        draft.miss("use-routing-replay", "included in --use-rollout-routing-replay")
    else:
        draft.put("replay.mode", "R2" if from_learner else "none", "use-routing-replay")


def _correction(draft: Draft) -> None:
    """All of slime's rules read train / rollout, the merged ratio, but OPSM, which reads current / old."""
    rules: list[dict[str, Any]] = []
    used = []
    weighs, measures = on(draft, "use-tis"), on(draft, "get-mismatch-metrics")
    function = word(draft, "custom-tis-function-path")
    if function is not None and (weighs or measures):
        rules.append(_custom(draft, function))
        used += ["custom-tis-function-path", "tis-clip", "tis-clip-low", *(["use-tis"] if weighs else [])]
    elif weighs:
        thresholds: dict[str, float | str] = {"cap": _float(draft, "tis-clip")}
        if low := _float(draft, "tis-clip-low"):
            thresholds["floor"] = low
        rules.append({"name": "token_tis", "thresholds": {**thresholds, "ratio": "merged"}})
        used += ["use-tis", "tis-clip", "tis-clip-low"]
    if on(draft, "use-opsm"):
        ratio = "total" if on(draft, "use-rollout-logprobs") else "update"
        rules.append({"name": "opsm", "thresholds": {"delta": _float(draft, "opsm-delta"), "ratio": ratio}})
        used += ["use-opsm", "opsm-delta"]
    if rules:
        draft.put("correction.rules", rules, *used)


def _custom(draft: Draft, function: str) -> dict[str, Any]:
    """slime's own IcePop is ours. Any other function is its author's own."""
    if function.rpartition(".")[2] == "icepop_function" and function.startswith(("slime.", "miles.")):
        band = {"low": _float(draft, "tis-clip-low"), "high": _float(draft, "tis-clip")}
        return {"name": "icepop", "thresholds": {**band, "ratio": "merged"}}
    raise NeedsDecisionError(
        "custom-tis-function-path",
        f"{function} is a function of its own: choose rules, or write one (examples/own_methods)",
    )


def _float(draft: Draft, key: str) -> float:
    value = number(draft, key)
    return 0.0 if value is None else value


def _kl(draft: Draft) -> None:
    if on(draft, "use-kl-loss"):
        draft.put("kl.coef", number(draft, "kl-loss-coef"), "kl-loss-coef", "use-kl-loss")
        draft.put("kl.where", "loss", "use-kl-loss")
        kind = word(draft, "kl-loss-type") or "k1"
        if on(draft, "use-unbiased-kl"):
            if kl_estimator("kl-loss-type", kind) != "k3":
                raise NeedsDecisionError("use-unbiased-kl", f"with {kind}: only k3 has this form here (k3_is)")
            draft.put("kl.estimator", "k3_is", "use-unbiased-kl", "kl-loss-type")
            # It weighs by current / old, and old is the rollout with --use-rollout-logprobs.
            draft.put("kl.ratio", "total" if on(draft, "use-rollout-logprobs") else "update", "use-unbiased-kl")
        else:
            draft.put("kl.estimator", kl_estimator("kl-loss-type", kind), "kl-loss-type")
    if number(draft, "kl-coef"):
        raise NeedsDecisionError("kl-coef", "the KL in the reward goes by the estimator in slime: set kl.where=reward")


CORRECTION: Sequence[Rule] = (
    Rule(("use-rollout-routing-replay", "use-routing-replay"), ("replay.mode",), _replay),
    Rule(
        (
            "use-tis",
            "tis-clip",
            "tis-clip-low",
            "custom-tis-function-path",
            "get-mismatch-metrics",
            "use-opsm",
            "opsm-delta",
        ),
        ("correction.rules",),
        _correction,
    ),
    Rule(
        ("use-kl-loss", "kl-loss-coef", "kl-loss-type", "use-unbiased-kl", "kl-coef"),
        ("kl.coef", "kl.where", "kl.estimator", "kl.ratio"),
        _kl,
    ),
)
