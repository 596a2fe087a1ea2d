"""Guarantees of trust-region masking: bounds on the error of the surrogate, for rewards in [0, 1].

E = J(pi) - J(mu) - E_mu[R sum_t (w_t - 1)] for answers of T tokens. delta bounds the KL of every context, D_seq is the
KL of a whole answer, Dbar_t the mean total variation at position t. KL is in nats. The theorems hold for the *maximum
over all contexts*. A batch has sampled contexts only, so figures computed from it are estimates of a certificate, not a
certificate.

Source: Trust Region Masking (arXiv 2512.23075), checked here by enumeration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def classical(horizon: int, delta: float) -> float:
    """T (T - 1) delta: the usual quadratic bound, without caps."""
    return horizon * (horizon - 1) * delta


def linear(horizon: int, delta: float) -> float:
    """4 T min(1, sqrt(delta / 2))."""
    return 4 * horizon * _tv(delta)


def pinsker_marginal(horizon: int, delta: float) -> float:
    """4 min(1, sqrt(delta / 2)) sum_t min(1, sqrt((t - 1) delta / 2)); about (4/3) T^1.5 delta while T delta <= 2."""
    return 4 * _tv(delta) * math.fsum(_tv(t * delta) for t in range(horizon))


def mixed(horizon: int, delta: float, sequence_kl: float) -> float:
    """4 T min(1, sqrt(D_seq / 2)) min(1, sqrt(delta / 2)); about 2 T sqrt(delta D_seq) when both are small."""
    return 4 * horizon * _tv(sequence_kl) * _tv(delta)


def adaptive(mean_tv: Sequence[float], delta: float) -> float:
    """4 sum_t Dbar_t min(1, sqrt((T - t) delta / 2)): late deviations cost little. `mean_tv` is Dbar_1..Dbar_T."""
    horizon = len(mean_tv)
    return 4 * math.fsum(tv * _tv((horizon - t) * delta) for t, tv in enumerate(mean_tv, start=1))


def certificate(horizon: int, delta: float, sequence_kl: float, mean_tv: Sequence[float]) -> dict[str, float]:
    """All five bounds, and `tightest`: the least of the last three. A surrogate above it proves an improvement."""
    bounds = {
        "classical": classical(horizon, delta),
        "linear": linear(horizon, delta),
        "pinsker_marginal": pinsker_marginal(horizon, delta),
        "mixed": mixed(horizon, delta, sequence_kl),
        "adaptive": adaptive(mean_tv, delta),
    }
    return bounds | {"tightest": min(bounds["pinsker_marginal"], bounds["mixed"], bounds["adaptive"])}


def acceptance_probability(horizon: int, violation_probability: float) -> float:
    """(1 - p)^T: the probability that no token of an answer violates a per-token threshold.

    Thresholds that are neutral per token therefore still reject long answers.
    """
    return (1 - violation_probability) ** horizon


def _tv(kl: float) -> float:
    """Pinsker: total variation is at most min(1, sqrt(KL / 2))."""
    return min(1.0, math.sqrt(kl / 2))
