"""Measurements of two synthetic engines, with a fault of known kind.

Shape letters: N tokens, L MoE layers, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_trm.tools.doctor.measurements import Measurements

N, L, E = 2000, 3, 16


def clean(seed: int = 0, noise: float = 1e-6, **changed: Any) -> Measurements:
    """Engines that differ by `noise` nats; `changed` replaces whole arrays."""
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(0.5, N)
    x = noise * rng.standard_normal(N)
    values: dict[str, Any] = {
        "group": np.arange(N) // 50,
        "position": 1 + np.arange(N) % 50,
        "rollout": rollout,
        "full": rollout,
        "replayed": x,
        "native": x,
        "entropy": rng.exponential(0.5, N),
        "flipped_layers": np.zeros(N, int),
        "touched": rng.random((N, L, E)) < 0.5,
    }
    return Measurements(**(values | changed))


def with_ratio(x: np.ndarray, **changed: Any) -> Measurements:
    """Engines that differ by `x`, whichever routes are used."""
    return clean(replayed=x, native=x, **changed)
