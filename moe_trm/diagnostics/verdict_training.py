"""Cases of the verdict about training itself: clipping, answers that grow, the gradient, what there is to learn from,
and the rollout servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moe_trm.diagnostics.verdict_types import Verdict, pick

RISING_STEPS = 20
LENGTH_SURGE = 1.2
LENGTH_WINDOW = 100
GRADIENT_NORM = 100.0
"""Above it the clip of the gradient leaves a direction without a size."""
WITHOUT_SIGNAL = 0.5
"""Share of groups that may have equal rewards."""


def clipping(history: Sequence[Mapping[str, float]]) -> Verdict | None:
    """The clip holds a high and rising share of tokens."""
    clipped = series(history, "loss/pg_clipfrac")
    if not clipped or clipped[-1] <= 0.2 or not rising(clipped):
        return None
    sentence = f"The clip cuts more and more of the gradient ({clipped[-1]:.0%} of tokens)."
    return Verdict("clipping", sentence, {"loss/pg_clipfrac": clipped[-1]}, "learner.minibatches=1")


def length(history: Sequence[Mapping[str, float]], key: str) -> Verdict | None:
    """Answers grew by a fifth within a hundred steps."""
    if len(history) <= LENGTH_WINDOW or key not in history[-1] or key not in history[-1 - LENGTH_WINDOW]:
        return None
    now, before = history[-1][key], history[-1 - LENGTH_WINDOW][key]
    if before <= 0 or now / before <= LENGTH_SURGE:
        return None
    sentence = f"Answers grew by {now / before - 1:.0%} in {LENGTH_WINDOW} steps, which amplifies every mismatch."
    return Verdict("length", sentence, {key: now}, _half_lr(history[-1]))


def gradient(seen: Mapping[str, float]) -> Verdict | None:
    """A gradient far too long, or without a number."""
    norm = seen.get("optimizer/grad_norm", 0.0)
    if norm <= GRADIENT_NORM:
        return None
    said = (
        f"The gradient has a norm of {norm:,.0f}: what clips it leaves its direction alone, and one row may set that."
    )
    return Verdict("gradient", said, {"optimizer/grad_norm": norm}, _half_lr(seen))


def signal(seen: Mapping[str, float]) -> Verdict | None:
    """Most groups have equal rewards, so nothing can be learned from them."""
    name = "reward/zero_variance_groups"
    share = seen.get(name, 0.0)
    if share <= WITHOUT_SIGNAL:
        return None
    said = f"{share:.0%} of the groups have equal rewards and teach nothing: their prompts are too easy or too hard."
    return Verdict("signal", said, {name: share}, "batch.zero_variance=drop")


def servers(history: Sequence[Mapping[str, float]]) -> Verdict | None:
    """A rollout server is out of service, or was during this step."""
    seen = history[-1]
    lost, evidence = seen.get("rollout/servers_lost", 0.0), pick(seen, "rollout/servers_lost", "rollout/losses")
    if lost:
        total = lost + seen.get("rollout/servers", 0.0)
        away = f"{lost:.0f} of {total:.0f} rollout servers {'is' if lost == 1 else 'are'} out of service"
        said = f"{away}: rollout.log says why."
        return Verdict("servers", said, evidence, "")
    before = series(history[:-1], "rollout/losses")
    now = seen.get("rollout/losses", 0.0)
    if now <= (before[-1] if before else 0.0):
        return None
    said = (
        f"A rollout server was lost and came back ({now:.0f} losses, {seen.get('rollout/lost_s', 0.0):.0f} s out of "
        "service since the start): rollout.log says why."
    )
    return Verdict("servers", said, evidence, "")


def rising(values: Sequence[float]) -> bool:
    """True when the last `RISING_STEPS` values have a least-squares slope more than two standard errors above 0."""
    values = [value for value in values[-RISING_STEPS:] if math.isfinite(value)]
    n = len(values)
    if n < 5:
        return False
    center, average = (n - 1) / 2, math.fsum(values) / n
    spread = math.fsum((i - center) ** 2 for i in range(n))
    slope = math.fsum((i - center) * (v - average) for i, v in enumerate(values)) / spread
    residual = math.fsum((v - average - slope * (i - center)) ** 2 for i, v in enumerate(values))
    return slope > 2 * math.sqrt(residual / (n - 2) / spread)


def series(history: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """A metric of the steps that measured it."""
    return [step[name] for step in history if name in step]


def _half_lr(seen: Mapping[str, float]) -> str:
    lr = seen.get("optimizer/lr", 0.0)
    return f"optimizer.lr={lr / 2:g}" if lr > 0 else "optimizer.lr: half of what it is"
