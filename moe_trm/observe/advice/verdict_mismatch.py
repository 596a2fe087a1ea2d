"""Cases of the verdict about the mismatch: engines, stale weights, updates, heavy tails, and what corrections leave.

Each case is a function of one step's finished metrics, and None where it does not hold. What was not measured is no
case. The cause is the part of the log-ratio with the largest figure: engine, lag and update where they are known apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType

from moe_trm.methods.corrections import CORRECTIONS
from moe_trm.methods.limits import FAR_AHEAD, OUTLIER, RISING_STEPS
from moe_trm.observe.advice import remedies
from moe_trm.observe.advice.remedies import Remedy, Settings, first
from moe_trm.observe.advice.verdict_samples import lone_tokens
from moe_trm.observe.advice.verdict_types import Verdict, pick

Seen = Mapping[str, float]

PPL_TOLERANCE = 0.05
STALE = 0.05
"""k3 above which weights have moved too far."""
SEQUENCE_CHI2, EXPLODED_CHI2 = 100.0, 1e3
"""chi2 of rows beyond which a cause is looked for, and beyond which it is named though only noise adds up."""
NOISE_GROWTH = 4.0
"""Growth of the gradient's noise, by medians, that corrections may bring."""
DRIFTED = 0.3
"""chi2 of tokens that is low."""
BIASED_TV = 0.1
"""Total variation above which the token surrogate is biased: low below it."""
COHERENT = 0.02
"""Mean absolute log-ratio per token of a row, nats, that independent noise does not make."""
ICEPOP_MASKED, MASKED = 0.1, 0.25
"""Shares of tokens that IcePop, and all rules together, may drop."""
TAIL_BEFORE_A_FALL, TAIL_STEPS = 0.05, 10
"""Mean share of tokens with a ratio between the engines above 2 or below 1/2, and over how many steps. In
docs/evidence.md it was passed before 25 of 35 falls, and in 10 of the 32 runs at risk that never fell."""
MASKS_OF_ROWS = tuple(
    name for name, entry in CORRECTIONS.items() if entry.scope == "sequence" and not name.endswith("_tis")
)
"""Rules that drop rows."""
PRODUCTS = ("seq_tis", "seq_mis", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3")
"""Rules that judge by the product over a row."""

UNSPLIT = "cannot be known apart without log-probs under the weights that sampled (pipeline.behavior=snapshot)"
MAKES: Mapping[str, str] = MappingProxyType(
    {
        "engine": "the two engines, which disagree at the same weights, make it",
        "lag": "weights that moved between sampling and this step make it",
        "update": "the updates of this step make it",
        "staleness": "weights that moved since sampling make it",
        "merged": f"engines and stale weights together make it, which {UNSPLIT}",
        "total": f"its causes {UNSPLIT}",
    }
)
"""A part of the log-ratio as the cause of what a sentence says."""


def precision(seen: Seen, settings: Settings) -> Verdict | None:
    """The engines disagree at the same weights."""
    if "engine/k3_kl" not in seen:
        return None
    evidence = pick(seen, "engine/k3_kl", "engine/probs_pearson", "engine/ppl_ratio")
    bad = (
        not evidence["engine/k3_kl"] <= 0.05  # NaN is no agreement
        or evidence.get("engine/probs_pearson", 1.0) < 0.95
        or abs(evidence.get("engine/ppl_ratio", 1.0) - 1) > PPL_TOLERANCE
    )
    if not bad:
        return None
    routed = pick(seen, "probe/native_k3_kl", "probe/replayed_k3_kl", "probe/token_fraction", "probe/routing_share_se")
    share, error = _share_of_routes(routed), 2 * routed.get("probe/routing_share_se", 0.0)
    sentence = f"The two engines disagree at the same weights (k3 {evidence['engine/k3_kl']:.2g})"
    if share is not None and share - error > 0.5 and remedies.changes(remedies.REPLAY.config, settings):
        drawn = routed.get("probe/token_fraction", 1.0)
        sampled = f": {share:.0%} of it, ±{error:.0%}, by a probe of {drawn:.0%} of the tokens" if error else ""
        text = f"{sentence}, mostly because their routers choose other experts{sampled}."
        return Verdict("precision", text, evidence | routed, remedies.REPLAY.config)
    remedy = first(settings, remedies.precision(settings))
    text = f"{sentence}: align precision and kernels before any correction. First of all, {remedy.words}."
    return Verdict("precision", text, evidence | routed, remedy.config)


def before_a_fall(history: Sequence[Seen], judgement: Verdict) -> Verdict:
    """`precision` with a warning, where the tail between the engines is one after which rewards fell."""
    parts = ("engine/rollout_is_high_fraction", "engine/rollout_is_low_fraction")
    tails = [sum(step[part] for part in parts) for step in history[-TAIL_STEPS:] if all(part in step for part in parts)]
    share = sum(tails) / TAIL_STEPS
    if judgement.case != "precision" or len(tails) < TAIL_STEPS or share <= TAIL_BEFORE_A_FALL:
        return judgement
    text = (
        f"{judgement.sentence} In the mean of {TAIL_STEPS} steps {share:.1%} of the tokens have a ratio between the "
        f"engines above 2 or below 1/2: beyond {TAIL_BEFORE_A_FALL:.0%}, rewards of a tiny model fell later in 25 of "
        "35 runs."
    )
    return replace(judgement, sentence=text, evidence={**judgement.evidence, **pick(history[-1], *parts)})


def outlier(seen: Seen, settings: Settings) -> Verdict | None:
    """Single tokens that one engine is sure of and the other finds next to impossible."""
    gap = seen.get("engine/probs_diff_max", 0.0)
    if gap <= OUTLIER:
        return None
    text = (
        f"The engines agree but for single tokens, whose probabilities differ by up to {gap:.2f}: such a record is "
        "broken, so look at the token in the transcript, and let no row with one train."
    )
    remedy = first(settings, Remedy("correction.rules=[{name: trm_max, thresholds: {max_kl: 2.0}}]", ""))
    return Verdict("outlier", text, {"engine/probs_diff_max": gap}, remedy.config)


def unsplit(seen: Seen, settings: Settings) -> Verdict | None:
    """A large mismatch whose parts are not known."""
    name = _earliest(seen)
    size = seen.get(f"{name}/k3_kl", 0.0)
    if name == "engine" or size <= 0.05 or size <= seen.get("update/k3_kl", 0.0):
        return None
    what = "engines and stale weights" if name == "merged" else "engines, stale weights and updates"
    text = f"The policy is far from what sampled (k3 {size:.2g}). The shares of {what} {UNSPLIT}."
    if name == "merged" and _old_and_free(seen):
        text = (
            f"{text} Samples are up to {seen['rollout/age_max']:.0f} versions old, and no rule weighs or rejects them."
        )
        evidence = pick(seen, "merged/k3_kl", "total/k3_kl", "rollout/age_max")
        return Verdict("unsplit", text, evidence, remedies.WEIGHED.config)
    remedy = first(settings, remedies.SNAPSHOT, remedies.WEIGHED)
    return Verdict("unsplit", text, pick(seen, f"{name}/k3_kl", "total/k3_kl"), remedy.config)


def staleness(seen: Seen, settings: Settings) -> Verdict | None:
    """The weights moved too far, since sampling or within the step."""
    evidence = pick(seen, *(f"{part}/k3_kl" for part in ("lag", "update", "staleness", "engine", "merged", "total")))
    lag, update = evidence.get("lag/k3_kl", 0.0), evidence.get("update/k3_kl", 0.0)
    stale = max(evidence.get("staleness/k3_kl", 0.0), lag, update)
    other_k3 = max(evidence.get("engine/k3_kl", 0.0), evidence.get("merged/k3_kl", 0.0))
    if stale <= STALE or stale <= other_k3:
        return None
    if lag > update:
        remedy = first(settings, *_cause(seen, "lag", settings))
        text = (
            f"The weights moved between sampling and this step (lag k3 {lag:.2g}, update {update:.2g}): {remedy.words}."
        )
        return Verdict("lag", text, evidence, remedy.config)
    remedy = first(settings, *_cause(seen, "update", settings))
    text = (
        f"The policy has moved away from the samples it trains on within the step (staleness k3 {stale:.2g}, "
        f"before it {other_k3:.2g}): {remedy.words}."
    )
    return Verdict("staleness", text, evidence, remedy.config)


def masking(seen: Seen, settings: Settings) -> Verdict | None:
    """The corrections drop or outweigh so many tokens that their cause should be mended instead."""
    icepop = [1 - value for name, value in seen.items() if _is_kept_by(name, "icepop")]
    masked, of_icepop = 1 - seen.get("correction/kept_fraction", 1.0), max(icepop, default=0.0)
    size = seen.get("correction/weight_eff_sample_size", 1.0)
    if of_icepop <= ICEPOP_MASKED and masked <= MASKED and size >= 0.3:
        return None
    masked = max(masked, of_icepop)
    pearson = seen.get("engine/probs_pearson", 1.0)
    stage = escalation(seen.get("total/chi2_token", 0.0), masked, size, pearson)
    part = dominant(seen, "k3_kl")
    evidence = pick(seen, "correction/kept_fraction", "correction/weight_eff_sample_size", f"{part}/k3_kl")
    text = (
        f"Corrections drop {masked:.0%} of the tokens (effective sample size after them {size:.2f}), and {MAKES[part]}"
    )
    if stage == "systems":
        remedy = first(settings, *_cause(seen, part, settings))
        return Verdict("masking", f"{text}: {remedy.words} instead of rejecting more.", evidence, remedy.config)
    remedy = first(settings, remedies.token_weights(part), *_cause(seen, part, settings))
    return Verdict("masking", f"{text}: {remedy.words} instead of dropping them.", evidence, remedy.config)


def variance(seen: Seen, settings: Settings) -> Verdict | None:
    """A heavy tail: few tokens carry the importance weights."""
    evidence = pick(seen, "total/rollout_is_eff_sample_size", "total/chi2_token", "total/chi2_seq")
    size, chi2 = evidence.get("total/rollout_is_eff_sample_size", 1.0), evidence.get("total/chi2_token", 0.0)
    if size >= 0.5 and chi2 <= 1:
        return None
    part = dominant(seen, "chi2_token")
    evidence |= pick(seen, f"{part}/chi2_token")
    text = (
        f"A few tokens dominate the importance weights (effective sample size {size:.2f}, chi2 {chi2:.2g}), "
        f"and {MAKES[part]}"
    )
    masked = 1 - seen.get("correction/kept_fraction", 1.0)
    # The weights of the total ratio are no one's: after correction is what trains.
    applied = seen.get("correction/weight_eff_sample_size", 1.0)
    if escalation(chi2, masked, applied, seen.get("engine/probs_pearson", 1.0)) == "systems":
        remedy = first(settings, *_cause(seen, part, settings))
        return Verdict("variance", f"{text}: {remedy.words}, which no rule replaces.", evidence, remedy.config)
    remedy = first(settings, remedies.band(part), *_cause(seen, part, settings))
    return Verdict("variance", f"{text}: {remedy.words}.", evidence, remedy.config)


def sequence(seen: Seen, settings: Settings) -> Verdict | None:
    """Products over rows explode though single tokens are in order."""
    chi2, drop = seen.get("total/chi2_seq", 0.0), seen.get("total/log_ppl_abs_diff", 0.0)
    if chi2 <= SEQUENCE_CHI2:
        return None
    products = [rule for rule in PRODUCTS if any(_is_kept_by(name, rule) for name in seen)]
    if not (products or drop > COHERENT):
        return None
    part = dominant(seen, "chi2_seq")
    evidence = pick(seen, "total/chi2_seq", "total/log_ppl_abs_diff", f"{part}/chi2_seq")
    text = f"Ratios of whole answers explode (chi2 {chi2:.2g}) though those of tokens are in order, and {MAKES[part]}"
    if products:
        remedy = first(settings, remedies.GEOMETRIC_AND_TOKENS, *_cause(seen, part, settings))
        text = f"{text}. {products[0]} judges by these products: {remedy.words}."
        return Verdict("sequence", text, evidence, remedy.config)
    if part in ("update", "staleness"):
        remedy = first(settings, *_cause(seen, part, settings))
        return Verdict("sequence", f"{text}: {remedy.words}.", evidence, remedy.config)
    remedy = first(settings, remedies.geometric(part), *_cause(seen, part, settings))
    return Verdict("sequence", f"{text}. Rows as a whole have drifted: {remedy.words}.", evidence, remedy.config)


def drift(seen: Seen, settings: Settings) -> Verdict | None:
    """A moderate mismatch with weights still in order."""
    evidence = pick(seen, "total/chi2_token", "total/rollout_is_eff_sample_size")
    chi2 = evidence.get("total/chi2_token", 0.0)
    if chi2 <= DRIFTED:
        return None
    part = dominant(seen, "chi2_token")
    text = f"The policies drift apart moderately (chi2 {chi2:.2g}) with weights still in order, and {MAKES[part]}"
    cause = _cause(seen, part, settings)
    remedy = first(settings, *(cause if part in ("lag", "update", "staleness") else (remedies.geometric(part), *cause)))
    return Verdict("drift", f"{text}: {remedy.words}.", evidence, remedy.config)


def bias(seen: Seen, settings: Settings) -> Verdict | None:
    """Total variation is moderate and chi2 low: token ratios are biased, and weights that mend it are cheap.

    What the updates make is in the ratio of the loss.
    """
    tv = seen.get("total/tv", 0.0)
    part = dominant(seen, "tv")
    if tv <= BIASED_TV or part in ("update", "staleness"):
        return None
    remedy = first(settings, remedies.token_weights(part), remedies.geometric(part))
    if not remedy.config:
        return None
    evidence = pick(seen, "total/tv", "total/chi2_token", f"{part}/tv")
    text = (
        f"Token ratios are biased (total variation {tv:.2g}) with a small variance "
        f"(chi2 {seen.get('total/chi2_token', 0.0):.2g}), and {MAKES[part]}: {remedy.words}."
    )
    return Verdict("bias", text, evidence, remedy.config)


def exploded(seen: Seen, settings: Settings) -> Verdict | None:
    """Nothing else is found, and yet products over rows explode: noise adds up over long answers."""
    chi2 = seen.get("total/chi2_seq", 0.0)
    if chi2 <= EXPLODED_CHI2 or any(_is_kept_by(name, rule) for name in seen for rule in MASKS_OF_ROWS):
        return None
    text = (
        f"Small differences add up over long answers (chi2 of their ratios {chi2:.2g}, of tokens "
        f"{seen.get('total/chi2_token', 0.0):.2g}): weigh none by its product, and {remedies.TRUST_REGION.words}."
    )
    return Verdict("sequence", text, pick(seen, "total/chi2_seq", "total/chi2_token"), remedies.TRUST_REGION.config)


def costly(history: Sequence[Seen], settings: Settings) -> Verdict | None:
    """The gradient's noise rose when corrections began to act: their weights cost more than they mend."""
    name, size = "variance/pure_noise", "correction/weight_eff_sample_size"
    noise = {
        acts: [step[name] for step in history if name in step and (step.get(size, 1.0) < 1 - 1e-9) == acts]
        for acts in (False, True)
    }
    uncorrected, since = noise[False][-RISING_STEPS:], noise[True][-RISING_STEPS:]
    if (
        min(len(uncorrected), len(since)) < 3
        or not max(uncorrected) < median(since) > NOISE_GROWTH * median(uncorrected) > 0
    ):
        return None
    seen = history[-1]
    part = dominant(seen, "chi2_token")
    remedy = first(settings, remedies.band(part), remedies.NO_RULES)
    text = (
        f"The noise of the gradient is {median(since) / median(uncorrected):.0f} times what it was before corrections "
        f"acted, so their weights cost more than they mend: {remedy.words}."
    )
    return Verdict("variance", text, pick(seen, name, size, f"{part}/chi2_token"), remedy.config)


CASES: tuple[Callable[[Seen, Settings], Verdict | None], ...] = (
    precision,
    outlier,
    unsplit,
    staleness,
    masking,
    variance,
    sequence,
    drift,
    bias,
    exploded,
    lone_tokens,
)
"""In the order in which they are asked."""


def quadrant(seen: Seen) -> str:
    """Total variation, which bounds the bias of token ratios, by chi2, which bounds the variance of weights.

    Source: stochastic gradient ascent view of off-policy correction; the limits are ours.
    """
    tv, tokens, rows = (seen.get(f"total/{name}", 0.0) for name in ("tv", "chi2_token", "chi2_seq"))
    biased, noisy = tv > BIASED_TV, tokens > DRIFTED or rows > EXPLODED_CHI2
    advice = {
        (False, False): "both low, so no correction is needed",
        (True, False): "biased but not noisy: token weights or a geometric mask are enough",
        (False, True): "noisy but not biased: truncate or mask rows",
        (True, True): "both high: mend precision, routes or the age of samples before any rule",
    }
    return f"total variation {tv:.2g}, chi2 of tokens {tokens:.2g}, of rows {rows:.2g}: {advice[biased, noisy]}"


def escalation(chi2_token: float, masked_fraction: float, eff_sample_size: float, probs_pearson: float) -> str:
    """Correction needed: `rejection`, `rejection and token_tis`, or `systems` (repair the engines instead).

    systems: more than 25% masked, effective sample size below 0.3, Pearson below 0.95, or chi2 above 4. rejection and
    token_tis: chi2 above 2, or at least 10% masked. rejection: all else. Source: ours, after the field's health ranges.
    """
    if masked_fraction > 0.25 or eff_sample_size < 0.3 or probs_pearson < 0.95 or chi2_token > 4:
        return "systems"
    return "rejection and token_tis" if chi2_token > 2 or masked_fraction >= 0.1 else "rejection"


def dominant(seen: Seen, figure: str) -> str:
    """The part of the log-ratio with the largest `figure`, of the finest parts that have it; `total` where none has.

    Figures of rows are not measured of lag and update: where staleness has the largest, the larger k3 of the two tells.
    """
    for parts in (("engine", "lag", "update"), ("engine", "staleness"), ("merged", "update")):
        figures = {part: seen[f"{part}/{figure}"] for part in parts if f"{part}/{figure}" in seen}
        if len(figures) == len(parts):
            largest = max(figures, key=lambda part: figures[part])
            finer = {part: seen[f"{part}/k3_kl"] for part in ("lag", "update") if f"{part}/k3_kl" in seen}
            split = largest == "staleness" and len(finer) == 2
            return max(finer, key=lambda part: finer[part]) if split else largest
    return "total"


def measured(seen: Seen) -> bool:
    """True when any figure says how far the policy is from what sampled."""
    return any(f"{name}/k3_kl" in seen for name in ("engine", "merged", "total"))


def _earliest(seen: Seen) -> str:
    """The first ratio that is known: `engine`, or the sum that it is hidden in."""
    return next((name for name in ("engine", "merged") if f"{name}/k3_kl" in seen), "total")


def _share_of_routes(routed: Seen) -> float | None:
    """Share of the native mismatch that replayed routes remove; None where a probe did not measure it."""
    native, replayed = (routed.get(f"probe/{name}_k3_kl") for name in ("native", "replayed"))
    return None if not native or replayed is None else 1 - replayed / native


def _is_kept_by(name: str, rule: str) -> bool:
    parts = name.removeprefix("correction/").partition("/")
    return name.startswith("correction/") and parts[0].partition("@")[0] == rule and parts[2] == "kept_fraction"


def _old_and_free(seen: Seen) -> bool:
    """True when samples are far behind and no rule has judged them, neither by lag nor by anything else."""
    ruled = any(name.startswith("correction/") and name.count("/") > 1 for name in seen)
    return seen.get("rollout/age_max", 0.0) >= FAR_AHEAD and not ruled


def age_bound(history: Sequence[Seen]) -> int | None:
    """The largest age of samples to advise, in versions; None where no step was far from what sampled by age.

    A version costs `lag k3 / mean age`, and so many of them fit below `STALE`; one less than the oldest sample at most.
    The lowest of all steps counts: advice never loosens while the cause grows.
    """
    bounds = []
    for step in history:
        age, lag = int(step.get("rollout/age_max", 0.0)), step.get("lag/k3_kl", 0.0)
        if age >= 2 and lag > STALE:
            bounds.append(min(age - 1, int(STALE * step.get("rollout/age_mean", age) / lag)))
        elif age >= 2 and step.get("routing/moved_samples"):
            bounds.append(age - 1)
    return min(bounds, default=None)


def _cause(seen: Seen, part: str, settings: Settings) -> tuple[Remedy, ...]:
    """Changes that act on the part itself, best first."""
    if part == "lag":
        younger = remedies.younger(settings, seen)
        return (remedies.WEIGHED, *younger) if _old_and_free(seen) else (*younger, remedies.WEIGHED)
    if part in ("update", "staleness"):
        rate = remedies.half_rate(seen.get("optimizer/lr", 0.0))
        return (remedies.ONE_UPDATE, remedies.ONE_EPOCH, rate)
    if part == "engine":
        return (remedies.precision(settings),)
    return (remedies.SNAPSHOT, remedies.WEIGHED)
