"""Tools around an objective when data are old: learning-rate scales.

Shape letters: N rows.
"""

from __future__ import annotations

import math

from torch import Tensor

from moe_trm.errors import ConfigError


def ess_ratio(sequence_weights: Tensor) -> Tensor:
    """(sum w)^2 / (N sum w^2) of raw sequence ratios `[N]`, in (0, 1].

    It is 1 for equal weights. Source: VCPO (arXiv 2602.17616).
    """
    return sequence_weights.sum() ** 2 / (len(sequence_weights) * (sequence_weights**2).sum()).clamp(min=1e-30)


def ess_lr_scale(ratio: float, *, base: float = 1.0, form: str = "sqrt") -> float:
    """VCPO's learning-rate factor for a step: min(1, ratio / base)^(1/2), or without the root with `form="linear"`."""
    if form not in ("sqrt", "linear"):
        raise ConfigError("unknown form", where="ess_lr_scale", got=form, expected="sqrt, linear")
    capped = min(1.0, ratio / base)
    return math.sqrt(capped) if form == "sqrt" else capped


def surge_lr(lr: float, length: float, earlier_length: float, *, initial_lr: float, surge: float = 1.2) -> float:
    """Halve the learning rate when answers grew by more than `surge`, down to a tenth of `initial_lr`; call once per
    cool-down.

    The rule is published, floor and cool-down are ours.
    """
    grew = earlier_length > 0 and length / earlier_length > surge
    return max(0.5 * lr, 0.1 * initial_lr) if grew else lr
