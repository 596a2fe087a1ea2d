"""The growth of the bias of token ratios with flips of the router: the seeds' third conjecture, exactly.

`python -m benchmarks.evidence.flip_bias [--seeds N] [--json FILE]`. The conjecture: at the same KL of the token, flips
add a bias in proportion to T K delta, with K experts, delta the flip rate of an expert, and T tokens. With one expert
per token, K delta is twice the share p of flipped tokens.

A policy chooses among K tables by a router. The rollout's router sees Gumbel noise, so its choice is known in closed
form: softmax(router / noise). Its policy is the mixture, the learner's the table of the undisturbed router. The bias is
taken for token-level importance sampling, by dynamic programming, relative to the gradient. Two sweeps:

- `free`: the tables stay, more noise flips more tokens;
- `same KL`: the tables move closer as more tokens flip, so that the KL of the token stays.

Exponents are least-squares fits of log bias, with 95% intervals over random tasks.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.evidence.chain import Array, Chain, Divergence, softmax
from benchmarks.evidence.tasks import reasoning
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.observe.report.intervals import paired

LENGTHS = (16, 64, 256)
EXPERTS = (4, 16, 64)
FLIPPED = (0.003, 0.01, 0.03, 0.1, 0.2)
TOKEN_KL = 1e-6
STATES, RECOVERY = 32, 1 / 64
SPREAD = 0.5
"""Deviation of the experts' logits where they are free."""


@dataclass(frozen=True)
class RoutedPolicy:
    """A policy with one expert per token.

    Attributes:
        base: `[S, V]` logits.
        experts: `[K, S, V]`, what each expert adds.
        router: `[S, K]` logits.
    """

    base: Array
    experts: Array
    router: Array

    @classmethod
    def random(cls, base_SV: Array, experts: int, seed: int) -> RoutedPolicy:
        rng = np.random.default_rng(seed)
        return cls(base_SV, rng.normal(size=(experts, *base_SV.shape)), rng.normal(size=(len(base_SV), experts)))

    def tables(self, spread: float) -> Array:
        """Probabilities under each expert, `[K, S, V]`."""
        return np.stack([softmax(self.base + spread * added_SV) for added_SV in self.experts])

    def learner(self, spread: float) -> Array:
        """The policy without noise, `[S, V]`."""
        return np.asarray(self.tables(spread)[self.router.argmax(1), np.arange(len(self.router))])

    def rollout(self, spread: float, noise: float) -> Array:
        """The policy whose router sees Gumbel noise of this scale, `[S, V]`."""
        return np.asarray(np.einsum("sk,ksv->sv", softmax(self.router / noise), self.tables(spread)))

    def flipped(self, visits_S: Array, noise: float) -> float:
        """Share of tokens with another expert."""
        return float(visits_S @ (1 - softmax(self.router / noise).max(1)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--seeds", type=int, default=8, help="random tasks (default: 8)")
    args = parser.parse_args(argv)
    points = list(measure(args.seeds))
    rows: list[Row] = [
        {
            **key,
            "token_kl": statistics.fmean(float(point["token_kl"]) for point in cell),
            "relative_bias": statistics.fmean(float(point["bias"]) for point in cell),
        }
        for key, cell in _cells(points)
    ]  # fmt: skip
    report("Bias of token ratios by flips, relative to the gradient: means over tasks", rows, args.json)
    report("Exponents of the bias", list(exponents(points, args.seeds)))
    return 0


def measure(seeds: int) -> Iterator[Row]:
    """One point per task and setting."""
    for seed, length, experts in itertools.product(range(seeds), LENGTHS, EXPERTS):
        chain, base_SV = reasoning(seed, length, recovery=RECOVERY, states=STATES)
        policy = RoutedPolicy.random(base_SV, experts, seed)
        for sweep, share in itertools.product(("free", "same KL"), FLIPPED):
            spread, noise = settings(chain, policy, share, sweep == "same KL")
            pi_SV, mu_SV = policy.learner(spread), policy.rollout(spread, noise)
            yield {
                "seed": seed, "sweep": sweep, "tokens": length, "experts": experts, "flipped": share,
                "token_kl": Divergence.between(chain, mu_SV, pi_SV).token_kl,
                "bias": token_bias(chain, mu_SV, pi_SV),
            }  # fmt: skip


def token_bias(chain: Chain, mu_SV: Array, pi_SV: Array) -> float:
    """|E g - grad J| / |grad J| of token-level importance sampling from mu."""
    gradient_SV = chain.gradient(pi_SV)
    mean_SV = chain.expected_gradient(chain.visits(mu_SV), pi_SV, chain.action_values(mu_SV))
    return float(np.linalg.norm(mean_SV - gradient_SV) / np.linalg.norm(gradient_SV))


def settings(chain: Chain, policy: RoutedPolicy, share: float, same_kl: bool) -> tuple[float, float]:
    """Spread of the experts and noise of the router, for this share of flipped tokens."""
    spread, noise = SPREAD, _noise(chain, policy, SPREAD, share)
    # The experts move the visits, which move the flips: five rounds settle both.
    for _ in range(5 * same_kl):
        spread = bisect(partial(_distance, chain, policy, noise), TOKEN_KL)
        noise = _noise(chain, policy, spread, share)
    return spread, noise


def _noise(chain: Chain, policy: RoutedPolicy, spread: float, share: float) -> float:
    return bisect(partial(policy.flipped, chain.visits(policy.learner(spread)).mean(0)), share)


def _distance(chain: Chain, policy: RoutedPolicy, noise: float, spread: float) -> float:
    return Divergence.between(chain, policy.rollout(spread, noise), policy.learner(spread)).token_kl


def bisect(rises: Callable[[float], float], target: float) -> float:
    """The positive number at which a rising function reaches the target."""
    low, high = 1e-4, 1e-3
    while rises(high) < target:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < target else (low, middle)
    return high


def exponents(points: Sequence[Row], seeds: int) -> Iterator[Row]:
    """Of tokens, experts and flipped share, for each sweep: mean over tasks, with its interval."""
    for sweep in ("free", "same KL"):
        fits = []
        for seed in range(seeds):
            mine = [point for point in points if (point["sweep"], point["seed"]) == (sweep, seed)]
            design = np.log([[float(point[name]) for name in ("tokens", "experts", "flipped")] for point in mine])
            design = np.column_stack([design, np.ones(len(mine))])
            fits.append(np.linalg.lstsq(design, np.log([float(point["bias"]) for point in mine]), rcond=None)[0])
        for place, name in enumerate(("tokens", "experts", "flipped share")):
            values = [float(fit[place]) for fit in fits]
            low, high = paired(values).interval or (float("nan"), float("nan"))
            yield {"sweep": sweep, "of": name, "exponent": statistics.fmean(values), "low": low, "high": high}


def _cells(points: Sequence[Row]) -> Iterator[tuple[Row, list[Row]]]:
    """Points of all tasks under the same settings."""
    cells: dict[tuple[str | int | float, ...], list[Row]] = {}
    names = ("sweep", "tokens", "experts", "flipped")
    for point in points:
        cells.setdefault(tuple(point[name] for name in names), []).append(point)
    for key, cell in cells.items():
        yield dict(zip(names, key, strict=True)), cell


if __name__ == "__main__":
    sys.exit(main())
