"""Measures of suites of runs: means, differences within a seed and between all runs, noise, and Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, stdev, variance

import numpy as np

from benchmarks.evidence.measures import Interval, Value, measure, rows
from moe_trm.observe.report.intervals import NORMAL_95, binomial_reach, paired, welch

ROUTER_SUITES = ("router_noise", "router_noise_cures", "router_noise_rates")
"""Suites that ran `none` and `R3` with the same settings and seeds."""
SUITES = (*ROUTER_SUITES, "staleness", "dose", "full_collapse", "published_dose", "losses", "top_p", "precision",
          "phase_map", "decay")  # fmt: skip


def runs(file: str, arm: str, figure: str = "sampled") -> list[float]:
    """The value of each run of an arm, by seed."""
    [row] = [row for row in rows(file) if row.get("arm") == arm]
    return [float(value) for value in row[f"{figure}_runs"].split()]


@measure
def mean(file: str, arm: str, figure: str = "sampled") -> Value:
    """The mean over the runs of an arm; of figures without runs, the file's."""
    [row] = [row for row in rows(file) if row.get("arm") == arm]
    return fmean(runs(file, arm, figure)) if f"{figure}_runs" in row else float(row[figure])


@measure
def run(file: str, arm: str, seed: str, figure: str = "sampled") -> Value:
    """The value of one run."""
    return runs(file, arm, figure)[int(seed)]


@measure
def lowest(file: str, arm: str, figure: str = "sampled") -> Value:
    """The least value of an arm's runs."""
    return min(runs(file, arm, figure))


@measure
def highest(file: str, arm: str, figure: str = "sampled") -> Value:
    """The largest value of an arm's runs."""
    return max(runs(file, arm, figure))


def differences(file: str, arm: str, base: str, figure: str) -> list[float]:
    """`arm - base` of each seed that both have; an arm with fewer has the first ones."""
    pairs = zip(runs(file, arm, figure), runs(file, base, figure), strict=False)
    return [value - base_value for value, base_value in pairs]


@measure
def gain(file: str, arm: str, base: str, figure: str = "sampled") -> Value:
    """`arm - base`, paired by seed: Student's interval or the bootstrap's, whichever is wider on a side."""
    return interval_of(differences(file, arm, base, figure))


@measure
def crossing(file: str, arm: str, base: str, other_arm: str, other_base: str, figure: str = "sampled") -> Value:
    """`(arm - base) - (other_arm - other_base)`, paired by seed."""
    pairs = zip(
        differences(file, arm, base, figure), differences(file, other_arm, other_base, figure), strict=True
    )  # fmt: skip
    return interval_of([first - second for first, second in pairs])


def interval_of(values: Sequence[float]) -> Interval:
    difference = paired(values)
    assert difference.interval is not None, "a single run has no interval"
    return (difference.mean, *difference.interval)


@measure
def gain_by_answers(file: str, arm: str, base: str, answers: str, figure: str = "sampled") -> Value:
    """`arm - base` with the interval that so many answers of each run leave by themselves."""
    pairs = list(zip(runs(file, arm, figure), runs(file, base, figure), strict=True))
    difference, reach = fmean(value - base_value for value, base_value in pairs), binomial_reach(pairs, int(answers))
    return difference, difference - reach, difference + reach


@measure
def gain_over_all(arm: str, base: str, file: str = "") -> Value:
    """`arm - base` of independent runs, Welch's interval; `base` (and `arm`, without a file) of all router suites."""
    first, second = pooled(base), runs(file, arm) if file else pooled(arm)
    interval = welch(first, second)
    assert interval is not None, "a single run has no interval"
    return (fmean(second) - fmean(first), *interval)


def pooled(arm: str) -> list[float]:
    """The runs of an arm in all router suites."""
    return [value for file in ROUTER_SUITES for value in runs(file, arm)]


@measure
def num_over_all(arm: str) -> Value:
    """Number of runs of an arm in all router suites."""
    return len(pooled(arm))


@measure
def repetition(arm: str) -> Value:
    """Standard deviation of runs of the same arm and seed, over the seeds that all router suites have."""
    num = min(len(runs(file, arm)) for file in ROUTER_SUITES)
    return math.sqrt(fmean(variance([runs(file, arm)[seed] for file in ROUTER_SUITES]) for seed in range(num)))


@measure
def spread_over_seeds(arm: str) -> Value:
    """Standard deviation of all runs of the arm in the router suites."""
    return stdev(pooled(arm))


@measure
def deviation(file: str, arm: str, base: str, figure: str = "sampled") -> Value:
    """Standard deviation over seeds of `arm - base`."""
    return stdev(differences(file, arm, base, figure))


@measure
def deviation_by_answers(file: str, arm: str, base: str, answers: str, figure: str = "sampled") -> Value:
    """Standard deviation of a difference of shares of so many answers each, mean over the seeds."""
    pairs = list(zip(runs(file, arm, figure), runs(file, base, figure), strict=True))
    return binomial_reach(pairs, int(answers)) / NORMAL_95 * math.sqrt(len(pairs))


def seed_share(file: str) -> float:
    """Share of the variance within an arm that seeds explain: s^2 / (s^2 + e^2) of arms x seeds, at least 0.

    s^2 = (MS of seeds - MS of the rest) / arms, e^2 = MS of the rest, of the arms that have every seed.
    """
    values = [runs(file, row["arm"]) for row in rows(file) if "arm" in row]
    table = np.array([arm_values for arm_values in values if len(arm_values) == max(map(len, values))])
    arms, seeds = table.shape
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    error = (rest**2).sum() / ((arms - 1) * (seeds - 1))
    of_seeds = max(0.0, float((arms * table.mean(0).var(ddof=1) - error) / arms))
    return of_seeds / (of_seeds + float(error))


@measure
def seeds_explain_at_most(share: str) -> Value:
    """Suites in which seeds explain at most this share of the variance, of all: `N of M`."""
    return f"{sum(seed_share(file) <= float(share) for file in SUITES)} of the {len(SUITES)}"


def p_of(values: Sequence[float]) -> float:
    """Two-sided p of Student's paired t. With n - 1 degrees of freedom it is a finite sum (Abramowitz, Stegun 26.7)."""
    spread, degrees = stdev(values), len(values) - 1
    if not spread:
        return 0.0 if fmean(values) else 1.0
    angle = math.atan(abs(fmean(values)) / spread * math.sqrt(len(values)) / math.sqrt(degrees))
    first = degrees % 2
    term, total = (math.cos(angle), math.cos(angle)) if first else (1.0, 1.0)
    for place in range(2 + first, degrees - 1, 2):
        term *= math.cos(angle) ** 2 * (place - 1) / place
        total += term
    if first:
        inside = 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))
    else:
        inside = math.sin(angle) * total
    return 1 - inside


def family(file: str) -> list[tuple[str, str]]:
    """The pairs of arms that the suite compares in its primary measure, which comes first."""
    differences_of_file = [row for row in rows(file) if "difference" in row]
    names = [row["difference"] for row in differences_of_file if row["in"] == differences_of_file[0]["in"]]
    pairs = dict.fromkeys(tuple(name.split(" - ")) for name in names if name.count(" - ") == 1)
    return [(pair[0], pair[1]) for place, pair in enumerate(pairs) if pair[::-1] not in list(pairs)[:place]]


@measure
def comparisons(file: str) -> Value:
    """Number of pairs of arms that the suite compares in its primary measure."""
    return len(family(file))


@measure
def holm(file: str, arm: str, base: str) -> Value:
    """Holm's adjusted p of `arm - base` among the suite's comparisons in the primary measure."""
    p = adjusted({pair: p_of(differences(file, *pair, "sampled")) for pair in family(file)})
    return p[arm, base] if (arm, base) in p else p[base, arm]


@measure
def survivors(file: str, figure: str = "sampled") -> Value:
    """Comparisons of the suite in its primary measure that Holm's correction leaves below 0.05, of all: `N of M`."""
    p = adjusted({pair: p_of(differences(file, *pair, figure)) for pair in family(file)})
    return f"{sum(value < 0.05 for value in p.values())} of {len(p)}"


@measure
def survivors_among(file: str, *arms: str) -> Value:
    """As `survivors`, of all pairs among these arms."""
    pairs = list(combinations(arms, 2))
    p = adjusted({pair: p_of(differences(file, *pair, "sampled")) for pair in pairs})
    return f"{sum(value < 0.05 for value in p.values())} of {len(p)}"


def adjusted(p: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Holm's adjusted p: the largest of p times the number of comparisons that are left, in order of p."""
    lowest_p, result = 0.0, dict[tuple[str, str], float]()
    for place, (key, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        lowest_p = max(lowest_p, min(1.0, value * (len(p) - place)))
        result[key] = lowest_p
    return result
