"""Prediction of a collapse within 200 updates by a few figures of a step: the seeds' second conjecture.

`python -m benchmarks.evidence.collapse [--seeds N] [--json FILE]`. Runs in the sandbox, with stale samples and large
learning rates, so that some collapse. Logits are linear in features that states share, since that is how real policies
fall apart: an update for one context moves the others. At every 20th update four figures are taken of the last 20
batches, as a run can measure them:

- `ess`: effective share of whole answers;
- `chi2`: 95th percentile of (w - 1)^2 over tokens;
- `clipped`: share of tokens whose ratio is more than 20% off;
- `length`: tokens of an answer.

Collapse: the exact expected reward falls below 70% of the best so far, and stays there for 100 updates. Moments at
which it is below that already do not count. A logistic regression of all four is fitted on half of the seeds and judged
on the other half by AUROC (0.5 is chance), with a 95% bootstrap interval over runs. Each figure is judged alone as
well, in the direction that it has in the first half: higher or lower before a collapse. So are two that nobody would
call a diagnosis: the learning rate, and how far the reward is below its best.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence.chain import Array, Chain, softmax
from benchmarks.evidence.estimators import Answers
from benchmarks.evidence.tasks import reasoning
from benchmarks.evidence.training import Adam, ascent_of
from benchmarks.options import command_line
from benchmarks.table import Row, report

LENGTHS, RATES, LAGS, RULES = (8, 16), (0.1, 0.3, 1.0), (20, 100, 200), ("none", "token")
UPDATES, BATCH, FEATURES = 600, 8, 3
EVERY, AHEAD, LASTING, FELL = 20, 200, 100, 0.7
"""Updates between two moments, that a prediction looks ahead, that a collapse lasts; and the share it falls to."""
RESAMPLES = 400
FIGURES = ("ess", "chi2", "clipped", "length")
ALONE = (*FIGURES, "rate", "below_best")
"""Judged each by itself: nobody would call the last two a diagnosis."""
RIDGE = 1e-3


@dataclass(frozen=True)
class Setting:
    """Settings of a run."""

    length: int
    rate: float
    lag: int
    rule: str


@dataclass(frozen=True)
class Course:
    """One run.

    Attributes:
        rewards: exact expected reward at every 5th update.
        figures: `[moments, 6]`, in the order of `ALONE`, at every `EVERY`-th update.
    """

    rewards: Array
    figures: Array

    @property
    def collapsed(self) -> bool:
        """True when it collapsed at some time."""
        return bool(self.begins().any())

    def begins(self) -> NDArray[np.bool_]:
        """Places where the reward is below `FELL` of the best so far and stays there for `LASTING` updates."""
        best, lasting = np.maximum.accumulate(self.rewards), LASTING // 5
        ahead = np.lib.stride_tricks.sliding_window_view(self.rewards, lasting)
        return np.asarray((ahead < FELL * best[: len(ahead), None]).all(1))

    def moments(self) -> Iterator[tuple[Array, bool]]:
        """Figures of each moment that counts, and whether a collapse begins within `AHEAD` updates."""
        begins = self.begins()
        for moment, figures in enumerate(self.figures, start=1):
            index = moment * EVERY // 5 - 1
            ahead = begins[index + 1 : index + 1 + AHEAD // 5]
            if len(ahead) == AHEAD // 5 and self.rewards[index] >= FELL * self.rewards[: index + 1].max():
                yield figures, bool(ahead.any())


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--seeds", type=int, default=8, help="runs of every setting (default: 8); half judge")
    args = parser.parse_args(argv)
    settings = [Setting(*values) for values in itertools.product(LENGTHS, RATES, LAGS, RULES)]
    courses = {(setting, seed): train(setting, seed) for setting in settings for seed in range(args.seeds)}
    rows = list(judged(courses))
    counted: list[Row] = [
        {
            "rule": rule,
            "lag": lag,
            "rate": rate,
            "collapsed": sum(courses[s, seed].collapsed for s in settings for seed in range(args.seeds)
                             if (s.rule, s.lag, s.rate) == (rule, lag, rate)),
            "of": len(LENGTHS) * args.seeds,
        }
        for rule, lag, rate in itertools.product(RULES, LAGS, RATES)
    ]  # fmt: skip
    report("Which runs collapse; then AUROC of collapse within 200 updates", [*counted, *rows], args.json)
    return 0


def train(setting: Setting, seed: int, updates: int = UPDATES) -> Course:
    """A run with its exact rewards and the figures of its batches."""
    chain, base_SV = reasoning(seed, setting.length, success=0.3)
    rng, adam = np.random.default_rng(seed), Adam(setting.rate)
    shared_SD = rng.normal(size=(len(base_SV), FEATURES)) / np.sqrt(FEATURES)
    weights_DV = np.zeros((FEATURES, base_SV.shape[1]))
    mu_SV, recent, rewards, figures = softmax(base_SV), [], [], []
    for update in range(1, updates + 1):
        pi_SV = softmax(base_SV + shared_SD @ weights_DV)
        answers = Answers.sample(chain, mu_SV, pi_SV, BATCH, rng)
        recent.append(answers.log_ratios)
        weights_DV = weights_DV + adam.step(shared_SD.T @ ascent(chain, pi_SV, answers, setting.rule))
        if update % setting.lag == 0:
            mu_SV = softmax(base_SV + shared_SD @ weights_DV)
        if update % 5 == 0:
            rewards.append(chain.value(softmax(base_SV + shared_SD @ weights_DV)))
        if update % EVERY == 0:
            figures.append([*measured(recent), setting.length, setting.rate, 1 - rewards[-1] / max(rewards)])
            recent = []
    return Course(np.array(rewards), np.array(figures))


def ascent(chain: Chain, pi_SV: Array, answers: Answers, rule: str) -> Array:
    """Direction of ascent by the logits, with token ratios or with none."""
    ratios = np.exp(answers.log_ratios) if rule == "token" else np.ones_like(answers.log_ratios)
    return ascent_of(chain, pi_SV, answers, ratios * (answers.rewards - answers.rewards.mean())[:, None])


def measured(recent: Sequence[Array]) -> tuple[float, float, float]:
    """Effective share of answers, 95th percentile of (w - 1)^2, and share of tokens off by more than 20%."""
    log_ratios = np.concatenate(recent)
    sequence_ratios = np.exp(np.clip(log_ratios.sum(1), -20, 20))
    ratios = np.exp(np.clip(log_ratios, -20, 20))
    off = np.abs(ratios - 1)
    share = float(sequence_ratios.sum() ** 2 / (len(sequence_ratios) * (sequence_ratios**2).sum()))
    return share, float(np.quantile(off**2, 0.95)), float((off > 0.2).mean())


def judged(courses: dict[tuple[Setting, int], Course]) -> Iterator[Row]:
    """AUROC of each predictor on the runs of odd seeds; the regression is fitted on the runs of even seeds."""
    fit, test = ([c for (_, seed), c in courses.items() if seed % 2 == part] for part in (0, 1))
    fitted = [moment for course in fit for moment in course.moments()]
    labels = np.array([label for _, label in fitted])
    groups = [list(course.moments()) for course in test]
    tested = [label for group in groups for _, label in group]
    if labels.all() or not labels.any() or all(tested) or not any(tested):
        yield {
            "predictor": "none",
            "before_it": "",
            "auroc": "not shown: too few collapses",
            "low": "",
            "high": "",
            "moments": len(tested),
        }
        return
    predict = logistic(np.array([features(figures) for figures, _ in fitted]), labels)
    scores = {"all four": [predict(np.array([features(f) for f, _ in group])) for group in groups if group]}
    signs = {name: direction(np.array([f[place] for f, _ in fitted]), labels) for place, name in enumerate(ALONE)}
    for place, name in enumerate(ALONE):
        scores[name] = [signs[name] * np.array([f[place] for f, _ in group]) for group in groups if group]
    tested_labels = [np.array([label for _, label in group]) for group in groups if group]
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, len(tested_labels), len(tested_labels)) for _ in range(RESAMPLES)]
    for name, values in scores.items():
        resampled = [
            area(np.concatenate([values[i] for i in d]), np.concatenate([tested_labels[i] for i in d])) for d in draws
        ]
        low, high = np.nanquantile(resampled, [0.025, 0.975])
        yield {
            "predictor": name,
            "before_it": {1: "higher", -1: "lower"}.get(signs.get(name, 0), ""),
            "auroc": area(np.concatenate(values), np.concatenate(tested_labels)),
            "low": float(low),
            "high": float(high),
            "moments": len(tested),
            "before_collapse": int(sum(tested)),
            "runs": len(tested_labels),
        }


def features(figures: Array) -> list[float]:
    """The four figures on scales on which a line can separate."""
    ess, chi2, clipped, length = figures[: len(FIGURES)]
    return [float(np.log(ess + 1e-6)), float(np.log(chi2 + 1e-6)), float(clipped), float(np.log(length))]


class Logistic:
    """A fitted regression: scores `[N]` of features `[N, F]`."""

    def __init__(self, mean: Array, scale: Array, coefficients: Array) -> None:
        self._mean, self._scale, self._coefficients = mean, scale, coefficients

    def __call__(self, features_NF: Array) -> Array:
        return np.asarray((features_NF - self._mean) / self._scale @ self._coefficients)


def logistic(features_NF: Array, labels: NDArray[np.bool_]) -> Logistic:
    """A logistic regression by Newton's method, with a small ridge."""
    mean, scale = features_NF.mean(0), features_NF.std(0) + 1e-9
    design = np.column_stack([(features_NF - mean) / scale, np.ones(len(features_NF))])
    coefficients = np.zeros(design.shape[1])
    for _ in range(30):
        chance = 1 / (1 + np.exp(-np.clip(design @ coefficients, -30, 30)))
        slope = design.T @ (labels - chance) - RIDGE * coefficients
        bend = (design * (chance * (1 - chance))[:, None]).T @ design + RIDGE * np.eye(design.shape[1])
        coefficients = coefficients + np.linalg.solve(bend, slope)
    return Logistic(mean, scale, coefficients[:-1])


def direction(values: Array, labels: NDArray[np.bool_]) -> int:
    """1 where the figure is higher before a collapse, -1 where it is lower."""
    return 1 if area(values, labels) >= 0.5 else -1


def area(scores: Array, labels: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: the chance that a collapse scores above a moment without, ties counting half."""
    if labels.all() or not labels.any():
        return float("nan")
    order = scores.argsort(kind="stable")
    _, inverse, counts = np.unique(scores[order], return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    ranks = np.empty(len(scores))
    ranks[order] = (ends - (counts - 1) / 2)[inverse]
    positives = int(labels.sum())
    return float((ranks[labels].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives)))


if __name__ == "__main__":
    sys.exit(main())
