"""From metrics to one sentence: the fault, the figures that show it, and the setting that acts on it.

The engine ratio is measured between two engines at the same weights. So numerics and staleness are separated without
another experiment. Thresholds are the field's (verl's guide to rollout correction). Those named in capitals here and in
`verdict_mismatch` and `verdict_training`, and the two-standard-error rule, are ours.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from moe_trm.methods.limits import LENGTH_WINDOW, RISING_STEPS, rising, series
from moe_trm.observe.advice.remedies import Remedy, Settings, first
from moe_trm.observe.advice.verdict_mismatch import (
    CASES,
    UNSPLIT,
    age_bound,
    before_a_fall,
    costly,
    escalation,
    measured,
)
from moe_trm.observe.advice.verdict_records import labels, routes
from moe_trm.observe.advice.verdict_samples import records, temperature
from moe_trm.observe.advice.verdict_training import (
    clipping,
    gradient,
    length,
    reward,
    router,
    servers,
    signal,
    untrained,
)
from moe_trm.observe.advice.verdict_types import Case, Verdict, pick

__all__ = [
    "LENGTH_WINDOW",
    "RISING_STEPS",
    "Case",
    "Verdict",
    "escalation",
    "mask_hides_gap",
    "nothing_trains",
    "rising",
    "verdict",
]

STALLED, STALLED_STEPS = 0.1, 3
"""Share of tokens that corrections keep, below which steps in a row train nothing worth the name."""

DECISIVE = ("optimizer/grad_norm", "reward/zero_variance_groups")
"""Measured by every step that trains: without these a calm mismatch says nothing about the run."""


def verdict(
    history: Sequence[Mapping[str, float]],
    *,
    length_key: str = "response/length_mean",
    settings: Settings = MappingProxyType({}),
) -> Verdict:
    """Judge the latest of `history` (finished metrics of each step, oldest first). What `settings` have already is not
    advised.

    | case | holds when | acts on it |
    |---|---|---|
    | `labels` | over 5% of answers are explained better by another version than by that of their label | the servers |
    | `routes` | replayed routes make over twice the mismatch of the learner's own, of fresh samples | the engine |
    | `records` | false masks, copied answers, log-probs of another temperature | the server |
    | `precision` | engine k3 above 0.05, Pearson below 0.95, or perplexities 5% apart | routes, dtype |
    | `outlier` | a token differs by over 0.8, or by over 0.2 and 16 times where others agree | reject its row |
    | `unsplit` | merged or total k3 above 0.05, and no part is known | snapshots; weights, if samples are old |
    | `lag`, `staleness` | k3 above 0.05 and above the engines'; made before or within the step | age, or updates |
    | `masking` | IcePop drops over 10%, all rules over 25%, or their weights leave an ESS below 0.3 | by `escalation` |
    | `variance` | ESS below 0.5 or chi2 above 1; a band on the part with the tail | by `escalation` |
    | `sequence` | chi2 of rows above 100, by a rule on products or by rows that drift as a whole | the part |
    | `drift` | chi2 above 0.3 | the part |
    | `bias` | total variation above 0.1 before the updates, chi2 below | token weights, or a mean of rows |
    | `sequence` | nothing of these, chi2 of rows above 1000, and no rule drops rows | a trust region |
    | `variance` | the noise of the gradient is 4 times what it was before corrections acted | the part, or no rules |
    | `router` | samples are beyond the bound on flips, with rows and layers in place | age, or lr |
    | `clipping`, `length` | over 20% clipped and rising; answers a fifth longer than 100 steps before | updates, lr |
    | `gradient`, `signal` | norm above 100, or none; over half of the groups have equal rewards | lr, dropping groups |
    | `learned` | and in over half of them every sample has the highest reward | harder prompts |
    | `reward` | the mean of 10 steps is 30% below the best such mean, by over four standard errors | lr |
    | `servers` | a rollout server is out of service, or was during this step | its log |
    | `stalled` | no optimizer step was made | what keeps tokens from training |

    The order is that of the table. A step is not judged on a metric that it did not measure, and a sentence says which
    causes cannot be known. The result is `unclear` if the mismatch was not measured at all. "Nothing needs to change"
    needs a healthy mismatch, and a gradient and rewards that were measured.

    Mismatch is read from `k3_kl`, which estimates the same KL as `kl` but is never negative. The share that routes have
    in it is that of the latest probe. Routes and temperature are of a server, not of a step: the last three steps that
    measured them must agree, so that a few tokens of one step name none.
    """
    if not history or not measured(history[-1]):
        return Verdict("unclear", "The mismatch was not measured, so nothing can be said.", {}, "")
    contradicted = labels(history[-1]) or routes(history) or records(history[-1]) or temperature(history, settings)
    if contradicted:
        return contradicted
    seen = {**last_probe(history), **history[-1], **advisable(history, settings)}
    history = [*history[:-1], seen]
    for judge in CASES:
        judgement = judge(seen, settings)
        if judgement:
            return before_a_fall(history, judgement)
    of_training = (
        costly(history, settings)
        or clipping(history, settings)
        or length(history, length_key)
        or gradient(seen)
        or signal(history, settings)
    )
    return (
        router(seen, settings) or of_training or reward(history) or servers(history) or untrained(seen) or _calm(seen)
    )


def advisable(history: Sequence[Mapping[str, float]], settings: Settings) -> dict[str, float]:
    """The grounds of advice besides the latest step: the bound on age by `age_bound`, and the configured learning rate.

    The rate of a step is smaller in warm-up, and half of it would not be what the configuration means.
    """
    bound, rate = age_bound(history), settings.get("optimizer.lr")
    figures = {} if bound is None else {"age_bound": float(bound)}
    return figures | ({"optimizer/lr": float(rate)} if isinstance(rate, (int, float)) and rate else {})


def last_probe(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of the latest probe: most steps make none, and their advice should not differ from it."""
    probed = (step for step in reversed(history) if "probe/native_k3_kl" in step)
    return {name: value for name, value in next(probed, {}).items() if name.startswith("probe/")}


def nothing_trains(history: Sequence[Mapping[str, float]], settings: Settings = MappingProxyType({})) -> Verdict | None:
    """Alarm where steps in a row keep hardly a token, or make no optimizer step: with the rule, the cause, its setting.

    The advice is that of `verdict`, which knows what is set.
    """
    recent = history[-STALLED_STEPS:]
    kept = [row.get("correction/kept_fraction", 1.0) for row in recent]
    made = [row.get("optimizer/steps", 1.0) for row in recent]
    stalled = [share < STALLED or steps == 0 for share, steps in zip(kept, made, strict=True)]
    if len(recent) < STALLED_STEPS or not all(stalled):
        return None
    seen, cause = recent[-1], verdict(history, settings=settings)
    kept_by_rule = {name: seen[name] for name in fnmatch.filter(seen, "correction/*/kept_fraction")}
    evidence = pick(seen, "correction/kept_fraction", "optimizer/steps", "optimizer/empty")
    if kept[-1] < STALLED:
        why = f"corrections keep {kept[-1]:.1%} of the tokens"
        if kept_by_rule:
            strictest = min(kept_by_rule, key=lambda name: kept_by_rule[name])
            why, evidence = (
                f"{why}, {strictest.split('/')[1]} alone {kept_by_rule[strictest]:.1%}",
                evidence | {strictest: kept_by_rule[strictest]},
            )
    else:
        why = "no token that is kept has an advantage" if seen.get("optimizer/empty") else "no sample was left to train"
    advice = "" if cause.case == "stalled" else f" {cause.sentence}"
    sentence = f"Nothing trains, for {STALLED_STEPS} steps or more: {why}.{advice}"
    return Verdict("stalled", sentence, evidence, cause.config)


def mask_hides_gap(history: Sequence[Mapping[str, float]], settings: Settings = MappingProxyType({})) -> Verdict | None:
    """Alarm for a correction that rejects ever less while the mismatch grows: its threshold no longer measures it."""
    kept, gap = series(history, "correction/kept_fraction"), series(history, "total/k3_kl")
    if not (rising(kept) and rising(gap)):
        return None
    evidence = {"correction/kept_fraction": kept[-1], "total/k3_kl": gap[-1]}
    sentence = (
        f"Fewer tokens are rejected (kept {kept[-1]:.3f}) while the mismatch grows (k3 {gap[-1]:.2g}): the threshold "
        "no longer sees it."
    )
    remedy = first(settings, Remedy("correction.rules=[{name: trm_max, target_reject_rate: 0.05}]", ""))
    return Verdict("drift", sentence, evidence, remedy.config)


def _calm(seen: Mapping[str, float]) -> Verdict:
    name = next(ratio for ratio in ("engine", "merged", "total") if f"{ratio}/k3_kl" in seen)
    figures = (f"{name}/k3_kl", f"{name}/probs_pearson", f"{name}/ppl_ratio", "total/k3_kl", "total/chi2_token")
    evidence = pick(seen, *figures, *DECISIVE)
    healthy = (
        evidence[f"{name}/k3_kl"] < 0.02
        and evidence.get(f"{name}/probs_pearson", 1.0) >= 0.99
        and abs(evidence.get(f"{name}/ppl_ratio", 1.0) - 1) < 0.01
    )
    what = {"engine": "engine", "merged": "engine and lag in one", "total": "total"}[name]
    state = "healthy" if healthy else "tolerable, not yet healthy"
    sentence = f"The mismatch is {state} ({what} k3 {evidence[f'{name}/k3_kl']:.2g})"
    if healthy and all(ratio in seen for ratio in DECISIVE):
        sentence = f"{sentence}; nothing needs to change"
    if name != "engine":
        sentence = f"{sentence}. Its causes {UNSPLIT}"
    return Verdict("ok", f"{sentence}.", evidence, "")
