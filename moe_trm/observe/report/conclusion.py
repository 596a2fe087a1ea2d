"""The conclusion of several runs: each measure of each configuration, the differences, and how sure they are.

Runs whose settings differ only by seed are one configuration. With two seeds or more on both sides a difference has a
95% interval (Welch's). With one seed it has none, and the sentence says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from moe_trm.config.flat import as_yaml, flatten
from moe_trm.observe.report.intervals import around_mean, welch
from moe_trm.observe.report.scale import short
from moe_trm.run_folder.run import Run

LAST_STEPS = 10
"""Steps at the end whose mean is compared, of what every step measures."""
PLACES = ("name", "seed", "run_dir", "observe.", "record.", "sync.dir", "checkpoint.", "rollout.url", "rollout.api_key",
          "rollout.server.port", "rollout.server.host", "rollout.bundle")  # fmt: skip
"""Settings that make no other configuration of a run."""


@dataclass(frozen=True)
class Configuration:
    """Runs that differ only by seed, and what sets them apart from the others."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> int:
        """Number of different seeds."""
        return len({run.config.get("seed") for run in self.runs})


@dataclass(frozen=True)
class Measure:
    """A metric by which runs are compared, called `words` in sentences.

    `at_end`: the value of the last common step; else the mean over the last common `LAST_STEPS` steps.
    """

    words: str
    metric: str
    at_end: bool = False


MEASURES = (
    Measure("accuracy of greedy answers (eval/accuracy)", "eval/accuracy", at_end=True),
    Measure("mean reward of greedy answers (eval/reward)", "eval/reward", at_end=True),
    Measure("reward of the samples (reward/mean)", "reward/mean"),
    Measure("mismatch of the engines (engine/k3_kl, nats)", "engine/k3_kl"),
    Measure("answer length (response/length_mean, tokens)", "response/length_mean"),
    Measure("tokens kept (correction/kept_fraction)", "correction/kept_fraction"),
    Measure("seconds of a step (time/step_s)", "time/step_s"),
)


@dataclass(frozen=True)
class Difference:
    """A configuration against the first one, in one measure.

    Attributes:
        interval: 95% of the difference; None where one side has a single seed.
    """

    measure: Measure
    when: str
    first: Configuration
    other: Configuration
    first_value: float
    other_value: float
    interval: tuple[float, float] | None

    @property
    def delta(self) -> float:
        return self.other_value - self.first_value

    @property
    def sentence(self) -> str:
        """The difference, and what may be concluded from it."""
        return (
            f"{self.when}, {self.measure.words}: {short(self.first_value)} in {self.first.label}, "
            f"{short(self.other_value)} in {self.other.label}: a difference of {self.difference_in_words}. "
            f"{self.certainty}"
        )

    @property
    def difference_in_words(self) -> str:
        """The difference with its sign, and its interval."""
        sign = "+" if self.delta >= 0 else "-"
        reach = f" (95% interval {short(self.interval[0])} to {short(self.interval[1])})" if self.interval else ""
        return f"{sign}{short(abs(self.delta))}{reach}"

    @property
    def certainty(self) -> str:
        """A clause on what the interval says."""
        if self.interval is None:
            single_seed = [side for side in (self.first, self.other) if side.seeds < 2]
            subject = "Each has one seed" if len(single_seed) == 2 else f"{single_seed[0].label} has one seed"
            return f"{subject}, so there is no interval: another seed may turn it around."
        if self.interval[0] > 0 or self.interval[1] < 0:
            higher = self.other.label if self.delta > 0 else self.first.label
            return f"It is higher in {higher}: the interval leaves 0 out."
        return "No difference is shown: the interval includes 0."


def configurations(runs: Sequence[Run]) -> list[Configuration]:
    """The runs by configuration, in the order in which these come first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        # A run whose settings are not known is no repetition of any other.
        key = as_yaml(sorted(_settings(run).items())) if run.config else f"{run.folder}"
        groups.setdefault(key, []).append(run)
    return [Configuration(_label(members, list(groups.values())), tuple(members)) for members in groups.values()]


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Every configuration against the first, in every measure that all runs have. Empty for one configuration."""
    groups = configurations(runs)
    results = []
    for measure in MEASURES:
        if (read := reader(runs, measure)) is not None:
            when, value = read
            results += [_difference(measure, when, groups[0], group, value) for group in groups[1:]]
    return results


def sentences(runs: Sequence[Run]) -> list[str]:
    """The conclusion in words: the first measure of every configuration, or why there is none."""
    groups = configurations(runs)
    if len(groups) == 1:
        return [f"These {len(runs)} runs have the same settings apart from the seed. {_spread(runs)}"]
    results = differences(runs)
    if not results:
        return ["These runs have no measure in common at a common step, so nothing can be concluded."]
    return [difference.sentence for difference in results if difference.measure is results[0].measure]


def _spread(runs: Sequence[Run]) -> str:
    """The mean over runs of one configuration, with its interval."""
    for measure in MEASURES:
        read = reader(runs, measure)
        if read is None:
            continue
        values = _by_seed(runs, read[1])
        interval = around_mean(values)
        if interval is None:
            return f"{read[0]}, {measure.words}: {short(values[0])}. They share one seed, so there is no interval."
        low, high = interval
        return f"{read[0]}, {measure.words}: {short(mean(values))}, 95% interval {short(low)} to {short(high)}."
    return "They have no measure in common at a common step."


def _difference(
    measure: Measure, when: str, first: Configuration, second: Configuration, value: Callable[[Run], float]
) -> Difference:
    sides = [_by_seed(side.runs, value) for side in (first, second)]
    return Difference(measure, when, first, second, mean(sides[0]), mean(sides[1]), welch(*sides))


def _by_seed(runs: Sequence[Run], value: Callable[[Run], float]) -> list[float]:
    """One value for each seed: repetitions of a seed are not independent."""
    by_seed: dict[Any, list[float]] = {}
    for run in runs:
        by_seed.setdefault(run.config.get("seed"), []).append(value(run))
    return [mean(values) for values in by_seed.values()]


def reader(runs: Sequence[Run], measure: Measure) -> tuple[str, Callable[[Run], float]] | None:
    """The steps at which runs are compared, and a run's value there; None without a common step of finite values."""
    finite = ({step for step, value in run.series(measure.metric) if value is not None} for run in runs)
    common = sorted(set.intersection(*finite)) if runs else []
    if not common:
        return None
    steps = common[-1:] if measure.at_end else common[-LAST_STEPS:]
    when = f"After step {steps[0]}" if measure.at_end else f"Over steps {steps[0]} to {steps[-1]}"

    def value(run: Run) -> float:
        return mean(number for step, number in run.series(measure.metric) if step in steps and number is not None)

    return when, value


def _settings(run: Run) -> Mapping[str, str]:
    return {key: as_yaml(value) for key, value in flatten(run.config).items() if not key.startswith(PLACES)}


def _label(members: Sequence[Run], groups: Sequence[Sequence[Run]]) -> str:
    """The name of a lone run; of several what sets them apart from the other configurations, in short."""
    if len(members) == 1:
        return members[0].name
    other_settings = [_settings(group[0]) for group in groups if group is not members]
    settings = _settings(members[0])
    distinct = [
        f"{key}={value}"
        for key, value in settings.items()
        if any(settings_of_group.get(key) != value for settings_of_group in other_settings)
    ]
    named = ", ".join(distinct[:2]) + (", ..." if len(distinct) > 2 else "")
    return f"{named or ' and '.join(run.name for run in members[:2])} ({len(members)} runs)"
