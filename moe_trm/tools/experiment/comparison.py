"""Paired differences between arms: the same seed on both sides, an interval over seeds, and what it allows to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from moe_trm.observe.report.conclusion import MEASURES, Measure, reader
from moe_trm.observe.report.intervals import PairedDifference, paired
from moe_trm.observe.report.scale import short
from moe_trm.tools.experiment.arms import Arm
from moe_trm.tools.experiment.primary import measure_of

LEAST_PAIRS = 3
"""Seeds that both arms need before anything is claimed."""


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline in one measure.

    Attributes:
        when: the steps whose values are compared.
        pairs: by seed that both have finished, the baseline's value and the arm's.
    """

    measure: Measure
    when: str
    first: Arm
    other: Arm
    pairs: tuple[tuple[int, float, float], ...]

    @property
    def difference(self) -> PairedDifference:
        return paired([other - first for _, first, other in self.pairs])

    @property
    def means(self) -> tuple[float, float]:
        return mean(first for _, first, _ in self.pairs), mean(other for _, _, other in self.pairs)

    @property
    def certainty(self) -> str:
        """A clause on what may be concluded."""
        if len(self.pairs) < LEAST_PAIRS:
            seeds = "1 seed" if len(self.pairs) == 1 else f"{len(self.pairs)} seeds"
            return f"no claim is possible with {seeds}: at least {LEAST_PAIRS} are needed"
        failed = [
            f"{len(arm.failed)} of {len(arm.states)} runs of {arm.name}"
            for arm in (self.first, self.other)
            if arm.failed
        ]
        apart = f", of the finished runs alone: {' and '.join(failed)} failed" if failed else ""
        if self.difference.holds_zero:
            return f"not shown: the interval holds 0{apart}"
        higher = self.other.name if self.difference.mean > 0 else self.first.name
        return f"higher in {higher}: the interval leaves 0 out{apart}"

    @property
    def told(self) -> str:
        """The difference with its sign and its interval."""
        found = self.difference
        reach = f" [{short(found.interval[0])}, {short(found.interval[1])}]" if found.interval else " (no interval)"
        return f"{'+' if found.mean >= 0 else '-'}{short(abs(found.mean))}{reach}"

    @property
    def sentence(self) -> str:
        first, other = self.means
        return (
            f"{self.when}, {self.measure.words}: {short(first)} in {self.first.name}, {short(other)} in "
            f"{self.other.name}; paired difference {self.told} over {len(self.pairs)} "
            f"seed{'s' if len(self.pairs) != 1 else ''}: {self.certainty}."
        )


def comparisons(arms: Sequence[Arm], against: str, primary_metric: str) -> list[Comparison]:
    """Every other arm against the baseline: in the primary metric first, then in what reports compare."""
    primary = measure_of(primary_metric)
    first = next(arm for arm in arms if arm.name == against)
    found = []
    for measure in (primary, *(each for each in MEASURES if each != primary)):
        found += [made for arm in arms if arm is not first and (made := _comparison(measure, first, arm)) is not None]
    return found


def conclusions(arms: Sequence[Arm], against: str, primary_metric: str) -> list[str]:
    """One sentence for each other arm, about the primary metric; where there is no pair, that."""
    primary = measure_of(primary_metric)
    found = {each.other.name: each for each in comparisons(arms, against, primary_metric) if each.measure == primary}
    said = []
    for arm in arms:
        if arm.name in found:
            said.append(found[arm.name].sentence)
        elif arm.name != against:
            said.append(
                f"{arm.name} against {against}, {primary.words}: no claim is possible, no seed has finished in both."
            )
    return said or ["There is one arm, so there is nothing to compare."]


def _comparison(measure: Measure, first: Arm, other: Arm) -> Comparison | None:
    seeds = sorted(first.runs.keys() & other.runs.keys())
    runs = [arm.runs[seed] for arm in (first, other) for seed in seeds]
    read = reader(runs, measure)
    if read is None:
        return None
    when, value = read
    return Comparison(
        measure, when, first, other, tuple((seed, value(first.runs[seed]), value(other.runs[seed])) for seed in seeds)
    )
