"""Settings that act on a cause. What a run has set already is never advised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moe_trm.methods.presets import PRESETS

Settings = Mapping[str, object]
"""Values of a run's configuration by dotted key, of those that verdicts advise; without a key nothing is known of it.

`pipeline.max_staleness` is the bound that holds, also where the mode makes it.
"""

NAME, RATIO = re.compile(r"name: (\w+)"), re.compile(r"ratio: (\w+)")


@dataclass(frozen=True)
class Remedy:
    """A change: settings as typed on the command line, and the same as a command in words."""

    config: str
    words: str


NONE_LEFT = Remedy("", "every setting that acts on it is set already, so look for its cause")

HALF_PRECISION = Remedy(
    "learner.dtype=float16 rollout.server.dtype=float16", "compute in float16 on both sides, which rounds finer"
)
SAME_KERNELS = Remedy("rollout.server.deterministic=true", "align kernels and tensor parallelism")
REPLAY = Remedy("replay.mode=R3", "replay the rollout's routes")
SNAPSHOT = Remedy("pipeline.behavior=snapshot", "find the cause first")
ONE_UPDATE = Remedy("learner.minibatches=1", "make fewer updates of a batch")
ONE_EPOCH = Remedy("learner.epochs=1", "go over a batch once")
WEIGHED = Remedy("correction.preset=decoupled_token_is", "weigh tokens by proximal / rollout, up to a cap")
"""The change that kept stale training going in docs/evidence.md."""
GEOMETRIC_AND_TOKENS = Remedy("correction.preset=decoupled_geo_rs_token_tis", "judge rows by a mean and weigh tokens")
NO_RULES = Remedy("correction.rules=[]", "leave them out")
TRUST_REGION = Remedy(
    "correction.rules=[{name: trm_max_avg, target_reject_rate: 0.05}]", "mask rows that are farthest away"
)


def first(settings: Settings, *remedies: Remedy) -> Remedy:
    """The first remedy that would change something; `NONE_LEFT` where none would."""
    return next((remedy for remedy in remedies if changes(remedy.config, settings)), NONE_LEFT)


def changes(config: str, settings: Settings) -> bool:
    """True where any of these settings is not what the run has. A bound on age changes something when it is lower.

    A list of rules does where one of them is not there with the ratio that it reads.
    """
    parts = (part.partition("=") for part in re.split(r" (?=[a-z_.]+=)", config) if part)
    return any(_differs(key, value, settings) for key, _, value in parts)


def precision(settings: Settings) -> Remedy:
    """Against engines that round differently."""
    dtypes = {str(settings.get(key)) for key in ("learner.dtype", "rollout.server.dtype")}
    return SAME_KERNELS if dtypes == {"float32"} or dtypes == {"float16"} else HALF_PRECISION


def band(part: str) -> Remedy:
    """IcePop on the part that has the tail. A loss contains the update, so that must not be weighed by again."""
    ratio_text = {"engine": "", "lag": ", ratio: lag", "merged": ", ratio: merged"}.get(
        part, f", ratio: {part}, weight: one"
    )
    config = f"correction.rules=[{{name: icepop, thresholds: {{low: 0.5, high: 5.0{ratio_text}}}}}]"
    return Remedy(config, "drop tokens outside a band before weighing the rest")


def geometric(part: str) -> Remedy:
    """The geometric mask on a part."""
    ratio_text = "" if part == "engine" else f", ratio: {part}"
    config = f"correction.rules=[{{name: geometric_mask, thresholds: {{low: 0.99, high: 1.01{ratio_text}}}}}]"
    return Remedy(config, "reject rows that drift as a whole")


def token_weights(part: str) -> Remedy:
    """Truncated token weights on a part that a loss does not contain."""
    ratio = "" if part == "engine" else f", ratio: {part if part in ('lag', 'merged') else 'merged'}"
    config = f"correction.rules=[{{name: token_tis, thresholds: {{cap: 2.0{ratio}}}}}]"
    return Remedy(config, "weigh tokens up to a cap")


def rules_of(settings: Settings) -> set[tuple[str, str]]:
    """Name and ratio of every rule that is set, by itself or by a preset; no ratio where it is the rule's own."""
    names = {key: value for key, value in settings.items() if re.fullmatch(r"correction\.rules\.\d+\.name", key)}
    rule_ratios = {
        (str(name), str(settings.get(key.removesuffix("name") + "thresholds.ratio", ""))) for key, name in names.items()
    }
    preset = PRESETS.get(str(settings.get("correction.preset")))
    return rule_ratios | {
        (name, str(thresholds.get("ratio", ""))) for name, thresholds in (preset.rules if preset else ())
    }


def younger(settings: Settings, seen: Mapping[str, float]) -> tuple[Remedy, ...]:
    """A bound on age below the largest age, below the bound there is, and as low as the lag per version needs.

    None where samples are at most one version old.
    """
    age, limit = int(seen.get("rollout/age_max", 0.0)), settings.get("pipeline.max_staleness")
    if age < 2:
        return ()
    bound = min(int(seen.get("age_bound", age - 1)), age - 1, *([limit - 1] if isinstance(limit, int) else []))
    return (Remedy(f"pipeline.max_staleness={max(bound, 0)}", "sample less far ahead"),)


def half_rate(lr: float) -> Remedy:
    """Half the learning rate."""
    config = f"optimizer.lr={lr / 2:g}" if lr > 0 else "optimizer.lr: half of what it is"
    return Remedy(config, "halve the learning rate")


def _differs(key: str, value: str, settings: Settings) -> bool:
    if key == "correction.rules":
        rules_set, names, ratio = rules_of(settings), NAME.findall(value), "".join(RATIO.findall(value))
        return any((name, ratio) not in rules_set for name in names) if names else bool(rules_set)
    if key not in settings:
        return True
    current = settings[key]
    if key == "pipeline.max_staleness":
        return int(value) < int(str(current))
    return value != (str(current).lower() if isinstance(current, bool) else str(current))
