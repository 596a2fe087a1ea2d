"""The lag that a rollout policy may have, and the effective sample size as its measure: the seeds' fifth conjecture.

`python -m benchmarks.evidence.lag_tolerance [--seeds N] [--json FILE]`. The conjecture is about objectives that use the
lagged policy mu as their reference: the largest stable lag is at most c ESS^alpha, with c about 50 and alpha about 1
in every family of tasks. Tabular policies are trained for 1,600 updates of Adam on 64 answers each. The sampler takes
over the learner's weights every L updates. Two objectives:

- `oapl`: (beta log(pi / mu) - (R - V))^2 over whole answers, V = beta log E exp(R / beta);
- `token`: token-level importance sampling without a bound, which has no such reference.

A run is stable when its exact expected reward ends no lower than 95% of the reward for L = 1 with the same settings,
and never falls by 30% from its highest value for good. ESS is 1 / (1 + chi2(pi || mu)), exact, mean over the moments
just before a push.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.evidence.chain import Array, Chain, softmax
from benchmarks.evidence.estimators import Answers
from benchmarks.evidence.tasks import reasoning
from benchmarks.evidence.training import Adam, ascent_of
from benchmarks.options import command_line
from benchmarks.table import Row, report

LAGS = (1, 10, 50, 100, 200, 400, 800)
UPDATES, BATCH, BETA = 1600, 64, 0.3
FAMILIES = {"8 tokens": (8, 0.0), "32 tokens": (32, 0.0), "32 tokens, mistakes are made good": (32, 1 / 8)}
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
OBJECTIVES = ("oapl", "token")


@dataclass(frozen=True)
class Run:
    """Exact course of one training run.

    Attributes:
        rewards: J at every 10th update, and at the end.
        ess: mean effective share of answers just before a push.
    """

    rewards: tuple[float, ...]
    ess: float

    def is_stable(self, reference: Run) -> bool:
        """True when it ends where lag 1 ends, and loses nothing for good."""
        highest, last = max(self.rewards), self.rewards[-1]
        return last >= 0.95 * reference.rewards[-1] and last > 0.7 * highest


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of every setting (default: 3)")
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"optimizer steps of a run ({UPDATES})")
    args = parser.parse_args(argv)
    rows = list(measure(args.seeds, args.updates))
    report("Reward at the end, effective sample size, and stability by lag", rows, args.json)
    report("The largest lag that every seed survived, against ESS there", list(laws(rows)))
    return 0


def measure(seeds: int, updates: int) -> Iterator[Row]:
    """One row per objective, family, learning rate and lag."""
    for objective, (family, (length, recovery)), rate in itertools.product(OBJECTIVES, FAMILIES.items(), RATES):
        references = [train(objective, length, recovery, rate, 1, seed, updates) for seed in range(seeds)]
        for lag in LAGS:
            runs = [train(objective, length, recovery, rate, lag, seed, updates) for seed in range(seeds)]
            yield {
                "objective": objective,
                "family": family,
                "lr": rate,
                "lag": lag,
                "reward": statistics.fmean(run.rewards[-1] for run in runs),
                "ess": statistics.fmean(run.ess for run in runs),
                "stable": sum(run.is_stable(first) for run, first in zip(runs, references, strict=True)),
                "of": seeds,
            }


def train(objective: str, length: int, recovery: float, rate: float, lag: int, seed: int, updates: int) -> Run:
    """A run whose sampler is up to `lag` updates behind."""
    chain, logits_SV = reasoning(seed, length, recovery=recovery, success=0.2)
    rng = np.random.default_rng(seed)
    adam, mu_SV, rewards, shares = Adam(rate), softmax(logits_SV), [], []
    for update in range(1, updates + 1):
        pi_SV = softmax(logits_SV)
        logits_SV = logits_SV + adam.step(direction(objective, chain, mu_SV, pi_SV, rng))
        if update % lag == 0:
            pi_SV = softmax(logits_SV)
            shares.append(1 / (1 + chain.chi2(mu_SV, pi_SV)))
            mu_SV = pi_SV
        if update % 10 == 0:
            rewards.append(chain.value(softmax(logits_SV)))
    return Run(tuple(rewards), statistics.fmean(shares) if shares else math.nan)


def direction(objective: str, chain: Chain, mu_SV: Array, pi_SV: Array, rng: np.random.Generator) -> Array:
    """Direction of ascent by the logits from a batch of answers of mu, `[S, V]`."""
    answers = Answers.sample(chain, mu_SV, pi_SV, BATCH, rng)
    if objective == "oapl":
        value = BETA * math.log(np.exp(answers.rewards / BETA).mean())
        gap = answers.rewards - value - BETA * answers.log_ratios.sum(1)
        factors = np.broadcast_to(gap[:, None], answers.log_ratios.shape)
    else:
        factors = np.exp(answers.log_ratios) * (answers.rewards - answers.rewards.mean())[:, None]
    return ascent_of(chain, pi_SV, answers, factors)


def laws(rows: Sequence[Row]) -> Iterator[Row]:
    """For each objective and family: the exponent of the largest stable lag against ESS, over learning rates."""
    for objective, family in itertools.product(OBJECTIVES, FAMILIES):
        points = []
        for rate in RATES:
            sweep = [row for row in rows if (row["objective"], row["family"], row["lr"]) == (objective, family, rate)]
            steady = list(itertools.takewhile(lambda row: row["stable"] == row["of"], sweep))
            if steady:
                points.append((float(steady[-1]["lag"]), float(steady[-1]["ess"])))
        spread = len({ess for _, ess in points}) > 1 and len({lag for lag, _ in points}) > 1
        exponent = (
            np.polyfit(np.log([e for _, e in points]), np.log([lag for lag, _ in points]), 1)[0] if spread else None
        )
        yield {
            "objective": objective,
            "family": family,
            "largest_lags": " ".join(f"{lag:g}" for lag, _ in points) or "none",
            "ess_there": " ".join(f"{ess:.2g}" for _, ess in points) or "none",
            "exponent": "not determined" if exponent is None else round(float(exponent), 2),
        }


if __name__ == "__main__":
    sys.exit(main())
