"""The error of the surrogate against the bounds of trust-region masking, by length, where both are exact.

`python -m benchmarks.evidence.trm_bounds [--seeds N] [--json FILE]`. The error is J(pi) - J(mu) - E_mu[R sum(w - 1)]. A
policy is moved from the sampler in a random direction, against it, along the gradient or along the natural gradient.
The bounds are from TRM (arXiv 2512.23075): Pinsker-marginal (theorem 4.4), mixed (4.5) and adaptive (4.6), beside the
classical one. A bound must never be below the error. How far it is above shows what it can guarantee: a step is known
to improve only when the surrogate exceeds the bound.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.evidence.chain import DIRECTIONS, Array, Divergence, at_distance, softmax
from benchmarks.evidence.tasks import reasoning
from benchmarks.options import command_line
from benchmarks.table import Row, report

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
TOKEN_KL = (1e-6, 1e-4, 1e-2)
RECOVERY = {"a mistake stays": 0.0, "mistakes are made good": 1 / 64}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--seeds", type=int, default=8, help="random tasks (default: 8)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of an answer (8 ... 512)")
    args = parser.parse_args(argv)
    rows = list(measure(args.lengths, args.seeds))
    report("Error of the surrogate, and bounds on it: medians over tasks", rows, args.json)
    below = sum(int(row["below_error"]) for row in rows)
    print(f"Bounds below the error: {below} of {len(rows) * 4 * args.seeds}.")
    return int(below > 0)


def measure(lengths: Sequence[int], seeds: int) -> Iterator[Row]:
    """One row per direction, task, distance and length: medians over the seeds, and counts of seeds.

    `below_error`: bounds below the error. `uphill`: surrogates above 0. `guaranteed`: surrogates above the least bound.
    `times_error`: the least bound over the error.
    """
    cells = itertools.product(DIRECTIONS, RECOVERY.items(), TOKEN_KL, lengths)
    for direction, (task, recovery), token_kl, length in cells:
        results = [_seed_result(seed, length, recovery, token_kl, direction) for seed in range(seeds)]
        names = list(results[0][2])
        yield {
            "direction": direction,
            "task": task,
            "token_kl": token_kl,
            "tokens": length,
            "gain": statistics.median(abs(gain) for gain, _, _ in results),
            "error": statistics.median(error for _, error, _ in results),
            **{name: statistics.median(bounds[name] for _, _, bounds in results) for name in names},
            "below_error": sum(bounds[name] < error * (1 - 1e-9) for _, error, bounds in results for name in names),
            "times_error": statistics.median(min(bounds.values()) / error for _, error, bounds in results),
            "uphill": sum(gain > 0 for gain, _, _ in results),
            "of": seeds,
            "guaranteed": sum(gain > min(bounds.values()) for gain, _, bounds in results),
        }


def _seed_result(
    seed: int, length: int, recovery: float, token_kl: float, direction: str
) -> tuple[float, float, Mapping[str, float]]:
    """The surrogate, the size of its error, and the bounds on that."""
    chain, logits_SV = reasoning(seed, length, recovery=recovery)
    mu_SV = softmax(logits_SV)
    drawn_SV = np.random.default_rng(seed).normal(size=logits_SV.shape)
    pi_SV = at_distance(chain, logits_SV, DIRECTIONS[direction](chain, mu_SV, drawn_SV), token_kl)
    surrogate = chain.surrogate(mu_SV, pi_SV)
    error = abs(chain.value(pi_SV) - chain.value(mu_SV) - surrogate)
    return surrogate, error, bounds(Divergence.between(chain, mu_SV, pi_SV))


def bounds(between: Divergence) -> dict[str, float]:
    """Bounds on the error of the surrogate, for rewards between 0 and 1 and with their caps.

    With delta the largest KL of a token, D the KL of an answer, TV_t the mean total variation of token t and
    p(x) = min(1, sqrt(x / 2)): classical 2 T (T - 1) eps^2; Pinsker-marginal 4 p(delta) sum_t p((t - 1) delta); mixed
    4 T p(D) p(delta); adaptive 4 sum_t TV_t p((T - t) delta).
    """
    length, delta = len(between.visits), between.largest_kl
    prefix_tv = pinsker(delta * np.arange(length, dtype=np.float64))
    token_tv = float(pinsker(np.array(delta)))
    return {
        "classical": 2 * length * (length - 1) * between.largest_tv**2,
        "pinsker_marginal": 4 * token_tv * float(prefix_tv.sum()),
        "mixed": 4 * length * min(1.0, math.sqrt(between.sequence_kl / 2)) * token_tv,
        "adaptive": 4 * float(between.tv_by_token @ prefix_tv[::-1]),
    }


def pinsker(divergence: Array) -> Array:
    """A bound on total variation by KL."""
    return np.asarray(np.minimum(1.0, np.sqrt(divergence / 2)))


if __name__ == "__main__":
    sys.exit(main())
