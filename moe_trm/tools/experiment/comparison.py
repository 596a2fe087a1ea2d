"""Paired differences between arms: the same seed on both sides, an interval over seeds, and what it allows to say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from moe_trm.observe.report.conclusion import MEASURES, Measure, reader
from moe_trm.observe.report.intervals import Interval, PairedDifference, binomial_reach, paired, welch
from moe_trm.observe.report.scale import short
from moe_trm.run_folder.run import Run
from moe_trm.tools.experiment.arms import Arm
from moe_trm.tools.experiment.primary import measure_of

SHARE = re.compile(r"(eval/(?:[^/]+/)?)(?:accuracy|pass_at_\d+|avg_at_(\d+))")
"""Evaluations that are a share of right answers; `avg_at_K` takes K answers to each prompt."""
LEAST_PAIRS = 3
"""Seeds that both arms need before anything is claimed."""


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline in one measure.

    Attributes:
        when: the steps whose values are compared.
        pairs: by seed that both have finished, the baseline's value and the arm's.
        answers: of which each value is the share of right ones; None where it is no such share.
    """

    measure: Measure
    when: str
    first: Arm
    other: Arm
    pairs: tuple[tuple[int, float, float], ...]
    answers: int | None = None

    @property
    def unpaired(self) -> Interval | None:
        """Welch's 95% interval of the same runs: right where a seed makes no two runs alike."""
        return welch([first for _, first, _ in self.pairs], [other for _, _, other in self.pairs])

    @property
    def doubt(self) -> str:
        """A clause on an interval that is narrower than the answers of the evaluation allow; empty for any other."""
        interval = self.difference.interval
        if self.answers is None or interval is None:
            return ""
        least = binomial_reach([(first, other) for _, first, other in self.pairs], self.answers)
        if (interval[1] - interval[0]) / 2 >= least:
            return ""
        return (
            f"WARNING: the interval is narrower than {self.answers} answers of a run allow by themselves "
            f"(+-{short(least)}), so a few seeds agree by luck"
        )

    @property
    def difference(self) -> PairedDifference:
        return paired([second - first for _, first, second in self.pairs])

    @property
    def means(self) -> tuple[float, float]:
        return mean(first for _, first, _ in self.pairs), mean(second for _, _, second in self.pairs)

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
        remark = f", of the finished runs alone: {' and '.join(failed)} failed" if failed else ""
        remark += f"; {self.doubt}" if self.doubt else ""
        if self.difference.holds_zero:
            return f"not shown: the interval holds 0{remark}"
        higher = self.other.name if self.difference.mean > 0 else self.first.name
        return f"higher in {higher}: the interval leaves 0 out{remark}"

    @property
    def difference_in_words(self) -> str:
        """The difference with its sign and its interval."""
        difference = self.difference
        reach = (
            f" [{short(difference.interval[0])}, {short(difference.interval[1])}]"
            if difference.interval
            else " (no interval)"
        )
        return f"{'+' if difference.mean >= 0 else '-'}{short(abs(difference.mean))}{reach}"

    @property
    def sentence(self) -> str:
        first, second_mean = self.means
        return (
            f"{self.when}, {self.measure.words}: {short(first)} in {self.first.name}, {short(second_mean)} in "
            f"{self.other.name}; paired difference {self.difference_in_words} over {len(self.pairs)} "
            f"seed{'s' if len(self.pairs) != 1 else ''}: {self.certainty}."
        )


def comparisons(arms: Sequence[Arm], against: str, primary_metric: str) -> list[Comparison]:
    """Every other arm against the baseline: in the primary metric first, then in what reports compare."""
    primary = measure_of(primary_metric)
    first = next(arm for arm in arms if arm.name == against)
    results = []
    for measure in (primary, *(measure_kind for measure_kind in MEASURES if measure_kind != primary)):
        results += [made for arm in arms if arm is not first and (made := _comparison(measure, first, arm)) is not None]
    return results


def conclusions(arms: Sequence[Arm], against: str, primary_metric: str) -> list[str]:
    """One sentence for each other arm, about the primary metric; where there is no pair, that."""
    primary = measure_of(primary_metric)
    by_arm = {
        comparison.other.name: comparison
        for comparison in comparisons(arms, against, primary_metric)
        if comparison.measure == primary
    }
    sentences = []
    for arm in arms:
        if arm.name in by_arm:
            sentences.append(by_arm[arm.name].sentence)
        elif arm.name != against:
            sentences.append(
                f"{arm.name} against {against}, {primary.words}: no claim is possible, no seed has finished in both."
            )
    return sentences or ["There is one arm, so there is nothing to compare."]


def _comparison(measure: Measure, first: Arm, second: Arm) -> Comparison | None:
    seeds = sorted(first.runs.keys() & second.runs.keys())
    runs = [arm.runs[seed] for arm in (first, second) for seed in seeds]
    read = reader(runs, measure)
    if read is None:
        return None
    when, value = read
    pairs = tuple((seed, value(first.runs[seed]), value(second.runs[seed])) for seed in seeds)
    return Comparison(measure, when, first, second, pairs, answers_of(runs, measure.metric))


def answers_of(runs: Sequence[Run], metric: str) -> int | None:
    """Held-out answers of which `metric` is the share of right ones, in the smallest evaluation; None for others."""
    share = SHARE.fullmatch(metric)
    if share is None:
        return None
    counts = [count for run in runs for _, count in run.series(f"{share[1]}prompts")[-1:] if count is not None]
    return int(min(counts)) * int(share[2] or 1) if counts and len(counts) == len(runs) else None
