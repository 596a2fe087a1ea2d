"""Figures of the mismatch beside those of the run's own earlier steps: a jump far below every absolute limit.

Stale weights under a fresh label, routes of older weights, or a cache that survived a push make ten to a hundred times
the mismatch of the same engines, and still less than other arithmetic would.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from moe_trm.observe.advice.verdict_types import Verdict

Seen = Mapping[str, float]

REFERENCE_STEPS, LEAST_STEPS = 50, 8
"""Healthy steps that make the reference, at most, and that it needs."""
FACTOR, SCORE = 10.0, 6.0
"""A jump is a value this many times the median, and this many robust deviations of logarithms above it."""
BROAD = 3.0
"""Growth of the 95th percentile over tokens at which one step is enough: single tokens do not make it."""
STEPS, CHANCE = 3, 1e-6
"""Jumps in a row that are told without it; and the chance of a row of jumps below which they are told."""
BEYOND = 2.0
"""How far beyond the largest value before a jump has to be: few tokens that take another expert make a figure that is
nearly always small and then large, and one at the beginning of an answer moves most tokens behind it."""
CARRIES = 3.0
"""A class of tokens carries a jump where its figure grew by so much more than another's of the same kind."""
TYPICAL = "engine/probs_diff_p95"
LEAST_K3 = 1e-5
"""Below it, rounding in float32 and one token on another expert make any multiple of next to nothing."""
WATCHED: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "engine/k3_kl": ("k3 between the engines", LEAST_K3),
        "engine/chi2_token_p95": ("chi2 of the worst rows", 1e-3),
        "engine/probs_diff_max": ("the largest difference of a token's probability between the engines", 0.1),
        "routing/native_flip_rate": ("the share of expert sets that the engines choose differently", 2e-3),
    }
)
"""Figures that are compared: in words, and the least value that is worth a sentence."""
WORDS: Mapping[str, str] = MappingProxyType({"servers": "server", "turns": "turn", "places": "tokens", "ages": "age"})
CLASSES = tuple(f"{kind}/engine_k3/*" for kind in WORDS)


@dataclass(frozen=True)
class _Course:
    """A figure over the steps that measured it, and which of its values jumped from those before them."""

    steps: Sequence[Seen]
    name: str
    jumps: Sequence[bool]

    @classmethod
    def of(cls, history: Sequence[Seen], name: str) -> _Course:
        steps = [step for step in history if name in step]
        if name.startswith("routing/"):  # flips grow with the age of samples
            age = history[-1].get("rollout/age_max", 0.0)
            steps = [step for step in steps if step.get("rollout/age_max", 0.0) >= age]
        healthy, jumps = list[float](), list[bool]()
        for value in (step[name] for step in steps):
            jumps.append(_is_jump(value, healthy[-REFERENCE_STEPS:]))
            if value > 0 and math.isfinite(value) and not jumps[-1]:
                healthy.append(value)
        return cls(steps, name, jumps)

    @property
    def num_jumps(self) -> int:
        """Jumps in a row that reach the latest step."""
        return next((place for place, flag in enumerate(reversed(self.jumps)) if not flag), len(self.jumps))

    @property
    def reference(self) -> list[float]:
        """The healthy values before the latest, or before the jumps that reach it."""
        earlier = zip(self.steps[:-1], self.jumps, strict=False)
        values = [step[self.name] for step, flag in earlier if not flag and step[self.name] > 0]
        return values[-REFERENCE_STEPS:]

    @property
    def chance(self) -> float:
        """Of as many jumps in a row as reach the latest step, at the rate of jumps before them, with one more."""
        earlier = self.jumps[: len(self.jumps) - self.num_jumps]
        return float(((sum(earlier) + 1) / (len(earlier) + 1)) ** self.num_jumps)

    @property
    def growth(self) -> float | None:
        """The latest value as a multiple of the median of the reference."""
        reference = self.reference
        return self.steps[-1][self.name] / median(reference) if len(reference) >= LEAST_STEPS else None

    def is_new(self, num_steps: int) -> bool:
        """True where the latest steps have values that no step before their jumps has had, single jumps included."""
        values = [step[self.name] for step in self.steps]
        return min(values[-num_steps:]) > BEYOND * max(values[: len(values) - self.num_jumps])


def jump(history: Sequence[Seen]) -> Verdict | None:
    """The latest step's figures are far above those of this run's healthy steps; told with what carries them.

    The reference of a figure is up to 50 values before it, without those that jumped: with median m and robust
    deviation s of their logarithms, not below log(10) / 6, x jumps where log(x / m) > 6 s. So ten times the median
    is the least that counts, and more where a figure varies. Beyond twice the largest value before, single jumps
    included, a jump is told in its first step where the 95th percentile over tokens is three times its median as well,
    else with the third such step in a row. Others are told when so many follow one another as chance would have at one
    of a million places, at the rate of single jumps before. Figures that contain lag are not compared, as lag grows
    with age. Nothing before the last hundred steps counts.
    """
    courses = {name: _Course.of(history, name) for name in _suspects(history)}
    latest_jumps = {name: course for name, course in courses.items() if course.num_jumps}
    if not latest_jumps:
        return None
    seen = history[-1]
    typical = _Course.of(history, TYPICAL).growth if TYPICAL in seen else None
    is_broad = typical is not None and typical >= BROAD
    certain_names = [
        name
        for name, course in latest_jumps.items()
        if (is_broad and name in WATCHED and course.is_new(1))
        or (course.num_jumps >= STEPS and course.is_new(STEPS))
        or course.chance < CHANCE
    ]
    if not certain_names:
        return None
    name, course = certain_names[0], latest_jumps[certain_names[0]]
    words = WATCHED[name][0] if name in WATCHED else f"k3 between the engines at {_class(name, seen)}"
    step = course.steps[-course.num_jumps].get("weights/version")
    since = "" if step is None else f", since step {step:.0f}"
    text = (
        f"{words[0].upper()}{words[1:]} jumped to {seen[name]:.2g}, {course.growth or math.inf:.0f} times what this "
        f"run's earlier steps had{since}{_carrier(history)}: samples, labels or routes are not what they were. Look "
        "for a server that keeps older weights or a cache, or a change of the engine."
    )
    return Verdict("jump", text, {key: seen[key] for key in (*certain_names, TYPICAL) if key in seen}, "")


def _suspects(history: Sequence[Seen]) -> list[str]:
    """Watched figures, and those of classes, whose latest value is large enough, and far above the smallest before."""
    if not history:
        return []
    seen = history[-1]
    least = {name: lowest for name, (_, lowest) in WATCHED.items() if name in seen}
    least |= {name: LEAST_K3 for kind in CLASSES for name in fnmatch.filter(seen, kind)}
    smallest = {name: min((step[name] for step in history[:-1] if name in step), default=math.inf) for name in least}
    return [name for name, lowest in least.items() if seen[name] > max(lowest, FACTOR * smallest[name])]


def _is_jump(value: float, reference: Sequence[float]) -> bool:
    if len(reference) < LEAST_STEPS or not value > FACTOR * min(reference):
        return False
    logs = [math.log(earlier) for earlier in reference]
    center = median(logs)
    deviation = 1.4826 * median(abs(earlier - center) for earlier in logs)
    return math.log(value) - center > SCORE * max(deviation, math.log(FACTOR) / SCORE)


def _carrier(history: Sequence[Seen]) -> str:
    """The class of tokens whose figure grew most, where another of its kind grew far less; else, that all did."""
    seen = history[-1]
    names = [name for kind in CLASSES for name in fnmatch.filter(seen, kind)]
    growth = {name: factor for name in names if (factor := _Course.of(history, name).growth) is not None}
    if len(growth) < 2:
        return ""
    worst = max(growth, key=lambda name: growth[name])
    peers = fnmatch.filter(growth, f"{worst.partition('/')[0]}/*")
    if not any(growth[name] * CARRIES < growth[worst] for name in peers):
        return ", in all classes of tokens"
    return f", carried by {_class(worst, seen)} ({growth[worst]:.0f} times)"


def _class(name: str, seen: Seen) -> str:
    """A class of tokens in words; an age with its version label, where steps have numbers."""
    kind, _, number = name.split("/")
    words = f"{WORDS[kind]} {number.replace('_up', ' and more').replace('_', ' to ')}"
    if kind == "servers":
        return f"{words} (the first of rollout.urls is 0)"
    version = seen.get("weights/version")
    if kind != "ages" or not number.isdigit() or version is None:
        return words
    return f"version label {version - 1 - int(number):.0f} (age {number})"
