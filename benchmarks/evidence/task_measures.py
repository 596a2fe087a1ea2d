"""Measures of single sections: courses of runs with router noise, estimators, budgets and collapses of the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.evidence.measures import Value, matching, measure, rows


@measure
def budget(end: str, dose: str, rule: str = "token") -> Value:
    """Gain over no correction as a share of its reward: the least, the most, or the worst case with its interval."""
    cases = [
        tuple(float(row[key]) / float(row["uncorrected"]) for key in ("gain", "low", "high"))
        for row in matching("budget", [f"token_kl={dose}", f"rule={rule}"])
    ]
    if end == "upper":
        return max(high for _, _, high in cases)
    if end == "worst":
        worst = max(cases)
        return (worst[0], worst[1], worst[2])
    return {"least": min, "most": max}[end](gain for gain, _, _ in cases)


def first_runs(arm: str) -> list[Mapping[str, Any]]:
    """The courses of an arm's six runs with router noise: of seeds 0 to 2, then of 3 to 5."""
    return [
        *(matching("router_noise_courses", [f"run={arm}-seed{seed}"])[0] for seed in range(3)),
        *(matching("early_warning", [f"run=headline/{arm}-seed{seed}"])[0] for seed in range(3, 6)),
    ]


@measure
def course(arm: str, seed: str, column: str) -> Value:
    """A column of one of these courses."""
    return float(first_runs(arm)[int(seed)][column])


@measure
def least_of_courses(arm: str, column: str) -> Value:
    """The least value of a column of these courses."""
    return min(float(row[column]) for row in first_runs(arm))


@measure
def most_of_courses(arm: str, column: str) -> Value:
    """The largest."""
    return max(float(row[column]) for row in first_runs(arm))


@measure
def fall(end: str) -> Value:
    """The least or largest fall of a reward of `none` from its best, as a share of it, in these courses."""
    falls = [1 - float(row["reward_last"]) / float(row["reward_best"]) for row in first_runs("none")]
    return {"least": min, "most": max}[end](falls)


@measure
def left_of_best(end: str, file: str) -> Value:
    """The least or largest end of a reward of `none`, as a share of its best."""
    courses = [row for row in rows(file) if str(row["run"]).startswith("none-")]
    return {"least": min, "most": max}[end](float(row["reward_last"]) / float(row["reward_best"]) for row in courses)


@measure
def best_estimator(direction: str, name: str) -> Value:
    """Cells of 256 tokens and more in which this estimator has the most progress, of all: `N of M`."""
    cells = aggregation_cells(direction)
    return f"{sum(max(cell, key=_share)['estimator'] == name for cell in cells)} of {len(cells)}"


@measure
def clear_between(direction: str) -> Value:
    """The cells in which the best estimator is clearly above token ratios and ratios of whole answers."""
    cells = aggregation_cells(direction)
    clear = 0
    for cell in cells:
        best = max(cell, key=_share)
        extremes = [row for row in cell if row["estimator"] in ("token", "sequence")]
        clear += best not in extremes and best["low"] > max(row["high"] for row in extremes)
    return f"{clear} of {len(cells)}"


def _share(row: Mapping[str, Any]) -> float:
    return float(row["share"])


def aggregation_cells(direction: str) -> list[list[Mapping[str, Any]]]:
    """Rows of 256 tokens and more, by task, distance, batch and length."""
    cells = dict[tuple[Any, ...], list[Mapping[str, Any]]]()
    for row in matching("aggregation", [f"direction={direction}"]):
        if row["tokens"] > 200:
            cells.setdefault(tuple(row[key] for key in ("task", "token_kl", "batch", "tokens")), []).append(row)
    return list(cells.values())


@measure
def collapsed(rule: str) -> Value:
    """Runs of the sandbox that collapsed under a rule, of all: `N of M`."""
    rule_rows = matching("collapse", [f"rule={rule}"])
    return f"{sum(row['collapsed'] for row in rule_rows)} of {sum(row['of'] for row in rule_rows)}"


@measure
def mask_cost() -> Value:
    """The largest loss by a mask of a tenth of the rows over all distances, as a share of the reward without it."""
    return max(-float(row["gain"]) / float(row["uncorrected"]) for row in matching("budget", ["rule=masked"]))


@measure
def flips_less() -> Value:
    """Flipped token-layers in bfloat16 over flipped ones in float16."""
    precisions = {row["value"]: float(row["token_layers"]) for row in matching("flip_depth", ["sweep=precision"])}
    return precisions["bfloat16"] / precisions["float16"]
