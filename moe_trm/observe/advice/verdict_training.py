"""Cases of the verdict about training itself: clipping, answers that grow, the gradient, what there is to learn from,
and the rollout servers.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pvariance

from moe_trm.methods.limits import CLIPPED, LENGTH_WINDOW, rising, series, surged
from moe_trm.observe.advice import remedies
from moe_trm.observe.advice.remedies import Remedy, Settings, first
from moe_trm.observe.advice.verdict_types import Verdict, pick

GRADIENT_NORM = 100.0
"""Above it the clip of the gradient leaves a direction without a size."""
WITHOUT_SIGNAL, WITH_SIGNAL, SIGNAL_STEPS = 0.5, 0.4, 10
"""Share of groups that may have equal rewards, in the mean of so many steps; and below which they no longer do."""
REWARD_WINDOW, REWARD_DROP = 10, 0.3
"""Steps over which rewards are averaged, and the share of the best such mean that may be lost."""


def router(seen: Mapping[str, float], settings: Settings) -> Verdict | None:
    """Replayed routes are no longer the live router's choice, and were found to be those of their tokens and layers."""
    if not seen.get("routing/moved_samples"):
        return None
    flips = seen["routing/local_flip_rate"]
    worst = max(fnmatch.filter(seen, "routing/local_flip_rate/layer_*"), key=lambda name: seen[name])
    remedy = first(settings, *remedies.younger(settings, seen), _half_rate(seen))
    text = (
        f"The router has moved since the engine chose these routes: {flips:.0%} of the replayed sets are no longer its "
        f"choice ({seen[worst]:.0%} in layer {worst.rpartition('_')[2]}), spread over the samples, and rows and layers "
        "were found in place. Train it in smaller steps, make fewer updates of a batch, or hold it with "
        "learner.freeze_router=true."
    )
    return Verdict("router", text, {"routing/local_flip_rate": flips, worst: seen[worst]}, remedy.config)


def clipping(history: Sequence[Mapping[str, float]], settings: Settings) -> Verdict | None:
    """The clip holds a high and rising share of tokens."""
    clipped = series(history, "loss/pg_clipfrac")
    if not clipped or clipped[-1] <= CLIPPED or not rising(clipped):
        return None
    remedy = first(settings, remedies.ONE_UPDATE, remedies.ONE_EPOCH, _half_rate(history[-1]))
    sentence = f"The clip cuts more and more of the gradient ({clipped[-1]:.0%} of tokens): {remedy.words}."
    return Verdict("clipping", sentence, {"loss/pg_clipfrac": clipped[-1]}, remedy.config)


def length(history: Sequence[Mapping[str, float]], key: str) -> Verdict | None:
    """Answers grew by a fifth within a hundred steps."""
    growth = surged(history, key)
    if growth is None:
        return None
    sentence = f"Answers grew by {growth - 1:.0%} in {LENGTH_WINDOW} steps, which amplifies every mismatch."
    return Verdict("length", sentence, {key: history[-1][key]}, _half_rate(history[-1]).config)


def gradient(seen: Mapping[str, float]) -> Verdict | None:
    """A gradient far too long, or without a number."""
    norm = seen.get("optimizer/grad_norm", 0.0)
    if norm <= GRADIENT_NORM:
        return None
    if not math.isfinite(norm):
        scaled = "float16's loss scale falls until it is one; else " if "optimizer/loss_scale" in seen else ""
        text = (
            "The gradient is no finite number, and the update was skipped: "
            f"{scaled}look for weights of a rule, advantages or a loss of your own that are not finite."
        )
        return Verdict("gradient", text, pick(seen, "optimizer/grad_norm", "optimizer/skipped"), "")
    text = (
        f"The gradient has a norm of {norm:,.0f}: what clips it leaves its direction alone, and one row may set that."
    )
    return Verdict("gradient", text, {"optimizer/grad_norm": norm}, _half_rate(seen).config)


def untrained(seen: Mapping[str, float]) -> Verdict | None:
    """No optimizer step was made, so the weights are those of the step before."""
    if seen.get("optimizer/steps", 1.0) > 0:
        return None
    text = (
        "Nothing was trained in this step: no token that was kept has a gradient. Look at what corrections keep, at "
        "the advantages, and at a loss of your own."
    )
    return Verdict("stalled", text, pick(seen, "optimizer/steps", "optimizer/empty", "correction/kept_fraction"), "")


def signal(history: Sequence[Mapping[str, float]], settings: Settings) -> Verdict | None:
    """Most groups have equal rewards, so nothing can be learned from them: in the mean of steps, since each has few."""
    name, right = "reward/zero_variance_groups", "reward/solved_groups"
    holds, share = _mostly(series(history, name))
    if not holds or settings.get("kl.where") == "advantage":
        return None
    seen, steps = history[-1], min(SIGNAL_STEPS, len(series(history, name)))
    over = f" (mean of {steps} steps)" if steps > 1 else ""
    text = f"{share:.0%} of the groups have equal rewards and teach nothing{over}"
    solves, solved = _mostly(series(history, right))
    if solves:
        learned = (
            f"This task is learned: in {solved:.0%} of the groups every sample has the highest reward{over}. Harder "
            "prompts teach more."
        )
        return Verdict("learned", learned, {name: share, right: solved}, "")
    lost = {key: seen[key] for key in fnmatch.filter(seen, "records/rejected/reward_*") if seen[key] > 0}
    if lost:
        counts_text = ", ".join(f"{count:.0f} {key.rpartition('/')[2]}" for key, count in lost.items())
        text = f"{text}, and rewards failed ({counts_text}): mend the reward first, the log says what it raised."
        return Verdict("signal", text, {name: share, **lost}, "")
    remedy = first(settings, Remedy("batch.zero_variance=drop", ""))
    return Verdict("signal", f"{text}: their prompts are too easy or too hard.", {name: share}, remedy.config)


def _mostly(shares: Sequence[float]) -> tuple[bool, float]:
    """Whether the mean of `SIGNAL_STEPS` passed `WITHOUT_SIGNAL`, and is above `WITH_SIGNAL` since; and that mean."""
    holds, mean = False, 0.0
    for end in range(1, len(shares) + 1):
        mean = fmean(shares[max(0, end - SIGNAL_STEPS) : end])
        holds = mean > (WITH_SIGNAL if holds else WITHOUT_SIGNAL)
    return holds, mean


def reward(history: Sequence[Mapping[str, float]]) -> Verdict | None:
    """The mean reward fell by nearly a third from its best, and not by chance: what was learned is being lost."""
    values = [value for value in series(history, "reward/mean") if math.isfinite(value)]
    if len(values) < 2 * REWARD_WINDOW:
        return None
    *earlier, latest = [values[i - REWARD_WINDOW : i] for i in range(REWARD_WINDOW, len(values) + 1)]
    best = max(earlier, key=math.fsum)
    high, recent = fmean(best), fmean(latest)
    chance = math.sqrt((pvariance(best) + pvariance(latest)) / REWARD_WINDOW)
    if high <= 0 or recent >= (1 - REWARD_DROP) * high or high - recent <= 4 * chance:
        return None
    fell = f"The reward fell from {high:.2g} to {recent:.2g} (means of {REWARD_WINDOW} steps)"
    text = f"{fell}: what was learned is being lost."
    return Verdict("reward", text, {"reward/mean": values[-1]}, _half_rate(history[-1]).config)


def servers(history: Sequence[Mapping[str, float]]) -> Verdict | None:
    """A rollout server is out of service, or was during this step."""
    seen = history[-1]
    lost, evidence = seen.get("rollout/servers_lost", 0.0), pick(seen, "rollout/servers_lost", "rollout/losses")
    if lost:
        total = lost + seen.get("rollout/servers", 0.0)
        away = f"{lost:.0f} of {total:.0f} rollout servers {'is' if lost == 1 else 'are'} out of service"
        text = f"{away}: rollout.log says why."
        return Verdict("servers", text, evidence, "")
    earlier = series(history[:-1], "rollout/losses")
    num_losses = seen.get("rollout/losses", 0.0)
    if num_losses <= (earlier[-1] if earlier else 0.0):
        return None
    text = (
        f"A rollout server was lost and came back ({num_losses:.0f} losses, {seen.get('rollout/lost_s', 0.0):.0f} s "
        "out of service since the start): rollout.log says why."
    )
    return Verdict("servers", text, evidence, "")


def _half_rate(seen: Mapping[str, float]) -> Remedy:
    return remedies.half_rate(seen.get("optimizer/lr", 0.0))
