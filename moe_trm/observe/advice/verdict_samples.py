"""Cases of the verdict about records that are not what they claim to be, at a mismatch that looks healthy.

Each case is a function of one step's finished metrics, and None where it does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moe_trm.methods.limits import FAR, FAR_APART, TIGHT
from moe_trm.observe.advice.remedies import Remedy, Settings, first
from moe_trm.observe.advice.verdict_types import REPEATS, Verdict, pick

Seen = Mapping[str, float]

SLOPE_OF_ODDS = "engine/log_odds_slope"
SLOPE, CORRELATED = math.log(1.2), 0.98
"""Log-odds of another temperature have a slope that differs from 1 by this factor, and are still so correlated. Noise
that changes the slope as much correlates less."""
ONE_LINE = 1 - 1e-6
"""A correlation above this is of two distinct tokens that answers repeat, which lie on some line. Log-odds of another
temperature are not on one: other ids differ from token to token.
"""
ERRORS = 4
"""Standard errors by which a slope has to be beyond `SLOPE`: of a few tokens it may be anything."""


def records(seen: Seen) -> Verdict | None:
    """Masks that the sampler cannot have kept, and answers that are copies."""
    if refused := seen.get("sampling_mask/refused_fraction", 0.0):
        text = (
            f"The sampling masks of {refused:.1%} of the rows are not what the sampler's settings leave, so these rows "
            "were not trained: compare the server's top_p, top_k and min_p with the run's."
        )
        return Verdict("records", text, {"sampling_mask/refused_fraction": refused}, "")
    if copies := seen.get("response/copies", 0.0):
        text = (
            f"{copies:.0f} answers are copies of others to the same prompt, token for token, although the policy makes "
            "that next to impossible: look for a seed that repeats, or a cache of answers before the server."
        )
        return Verdict("records", text, pick(seen, "response/copies", "response/copies_log_p"), "")
    return None


def temperature(history: Sequence[Seen], settings: Settings) -> Verdict | None:
    """Log-probs of another temperature, in the last `REPEATS` steps with a slope, or in all there are."""
    steps = [step for step in history if SLOPE_OF_ODDS in step][-REPEATS:]
    if not steps or SLOPE_OF_ODDS not in history[-1] or len(set(map(_way, steps))) > 1 or not (way := _way(steps[-1])):
        return None
    slope, of_run = steps[-1][SLOPE_OF_ODDS], settings.get("rollout.temperature", 1.0)
    text = (
        f"The rollout's log-probs are those of a {way} temperature than the run's {of_run} (the learner's log-odds "
        f"are {slope:.2f} times as far apart): look at the server's settings of log-probs."
    )
    return Verdict("records", text, pick(steps[-1], SLOPE_OF_ODDS, "engine/log_odds"), "")


def _way(seen: Seen) -> str:
    """`higher` or `lower` where a step's log-odds are those of such a temperature; else empty."""
    slope, correlation = seen[SLOPE_OF_ODDS], seen.get("engine/log_odds", 0.0)
    uncertainty = ERRORS * seen.get("engine/log_odds_slope_error", 0.0)
    if slope <= 0 or abs(math.log(slope)) < SLOPE + uncertainty or not CORRELATED <= correlation < ONE_LINE:
        return ""
    return "higher" if slope > 1 else "lower"


def lone_tokens(seen: Seen, settings: Settings) -> Verdict | None:
    """Single tokens far apart in a batch that agrees: re-tokenised text, or answers to other prompts."""
    gap, usual = seen.get("engine/probs_diff_max", 0.0), seen.get("engine/probs_diff_p95", math.inf)
    least, most = (seen.get(f"engine/rollout_is_{end}", 1.0) for end in ("min", "max"))
    factor = max(most, 1 / least if least > 0 else math.inf)
    if gap <= FAR_APART or factor <= FAR or usual > TIGHT:
        return None
    text = (
        f"The engines agree but for single tokens, whose probabilities differ by up to {gap:.2f} and by a factor of up "
        f"to {factor:.2g}. Their records are not of these tokens (text that was tokenised again, an answer to another "
        "prompt): look at them in the transcripts, and let no row with one train."
    )
    remedy = first(settings, Remedy("correction.rules=[{name: trm_max, thresholds: {max_kl: 2.0}}]", ""))
    evidence = pick(seen, "engine/probs_diff_max", "engine/rollout_is_min", "engine/rollout_is_max")
    return Verdict("outlier", text, evidence, remedy.config)
