"""Pooled statistics of probe steps: the share of the engine mismatch from expert routes, with bootstrap intervals.

Figures of single steps are noisy, because a handful of tokens carries most of the mismatch; use pooled figures. Tokens
of one prompt are alike, so the bootstrap resamples prompts. Shape letters: N tokens, G prompts, R resamples. NumPy
float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from moe_trm.errors import MoeTrmError
from moe_trm.ratios import LOG_RATIO_LIMIT

Array = NDArray[Any]


@dataclass(frozen=True)
class Interval:
    """A pooled figure with its bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class PooledTokens:
    """Scored tokens of one or many probe steps, each array `[N]`.

    Attributes:
        group: prompt of the token; tokens of different steps must not share a number.
        native, replayed: log-prob under the learner minus log-prob under the rollout engine, under the learner's own
            routes and under the rollout's.
        flipped_layers: MoE layers whose expert set differs between the engines at the token.
    """

    group: Array
    native: Array
    replayed: Array
    flipped_layers: Array


def load(folder: Path) -> PooledTokens:
    """The probe tokens that a run saved under `runs/NAME/probe` (`probe.save=true`), one file a step and rank.

    Raises:
        MoeTrmError: no probe files there.
    """
    files = sorted(folder.glob("step-*.safetensors"))
    if not files:
        raise MoeTrmError(
            "no probe arrays", where=str(folder), expected="step-*.safetensors", fix="run with probe.save=true"
        )
    parts = [load_file(file) for file in files]
    steps = np.repeat([file.name.split("-")[1] for file in files], [len(part["native"]) for part in parts])
    joined = {
        name: np.concatenate([part[name] for part in parts])
        for name in ("group_id", "native", "replayed", "flipped_layers")
    }
    _, group = np.unique(np.stack([steps.astype(np.int64), joined["group_id"]]), axis=1, return_inverse=True)
    return PooledTokens(group.reshape(-1), joined["native"], joined["replayed"], joined["flipped_layers"])


def pooled(
    tokens: PooledTokens,
    *,
    num_layers: int | None = None,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Pooled probe figures with percentile bootstrap intervals over prompts.

    `SET` is `all` or, where any token flipped, `flipped`.

    - `SET/native_k3`, `SET/replayed_k3`: mean of e^x - 1 - x, nats.
    - `SET/k3_reduction`: native over replayed; above 1 replay helps.
    - `token_flip_rate`: share of tokens with at least one flipped layer.
    - `layer_flip_rate`: share of flipped token-layers, with `num_layers`.

    The split is exact, so `all/native_k3 - all/replayed_k3` is the cost of routes. A figure that is 0 / 0 is left out.

    Raises:
        MoeTrmError: no tokens, or a log-ratio that is not finite.
    """
    if len(tokens.native) == 0 or not (np.isfinite(tokens.native).all() and np.isfinite(tokens.replayed).all()):
        raise MoeTrmError(
            "probe tokens cannot be pooled",
            got=f"{len(tokens.native)} tokens, finite: {np.isfinite(tokens.native).all()}",
            expected="at least one token, finite log-ratios",
        )
    flipped = np.asarray(tokens.flipped_layers) > 0
    columns = {"count": np.ones(len(flipped)), "flips": flipped, "layers": tokens.flipped_layers}
    for name, values in (("native", k3(tokens.native)), ("replayed", k3(tokens.replayed))):
        columns |= {name: values, f"{name}_flipped": np.where(flipped, values, 0.0)}
    figures: dict[str, tuple[str, str, float]] = {
        "all/native_k3": ("native", "count", 1.0),
        "all/replayed_k3": ("replayed", "count", 1.0),
        "all/k3_reduction": ("native", "replayed", 1.0),
        "token_flip_rate": ("flips", "count", 1.0),
    }
    if flipped.any():
        figures |= {
            "flipped/native_k3": ("native_flipped", "flips", 1.0),
            "flipped/replayed_k3": ("replayed_flipped", "flips", 1.0),
            "flipped/k3_reduction": ("native_flipped", "replayed_flipped", 1.0),
        }
    if num_layers:
        figures["layer_flip_rate"] = ("layers", "count", 1.0 / num_layers)
    return intervals(columns, figures, tokens.group, resamples=resamples, confidence=confidence, seed=seed)


def intervals(
    columns: Mapping[str, Array],
    figures: Mapping[str, tuple[str, str, float]],
    group: Array,
    *,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Ratios of pooled columns `[N]` with percentile bootstrap intervals over groups, such as prompts.

    `figures` is name -> (top, bottom, scale): `scale * sum(top) / sum(bottom)`; one that is 0 / 0 is left out.
    """
    sums_GC = _group_sums(columns, group)
    draws_RC = _bootstrap(sums_GC, resamples, seed)
    index = {name: position for position, name in enumerate(columns)}
    totals = sums_GC.sum(axis=0)
    tails = [100 * (1 - confidence) / 2, 100 * (1 + confidence) / 2]
    result = {}
    for name, (top, bottom, scale) in figures.items():
        value = scale * _ratio(totals[index[top]], totals[index[bottom]])
        drawn = scale * _ratio(draws_RC[:, index[top]], draws_RC[:, index[bottom]])
        drawn = drawn[~np.isnan(drawn)]
        if len(drawn) and not np.isnan(value):
            low, high = np.percentile(drawn, tails)
            result[name] = Interval(float(value), float(low), float(high))
    return result


def k3(log_ratio: Array) -> Array:
    """e^x - 1 - x of each clamped log-ratio, float64."""
    x = np.clip(np.asarray(log_ratio, np.float64), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values: Array = np.expm1(x) - x
    return values


def _group_sums(columns: Mapping[str, Array], group: Array) -> Array:
    _, index = np.unique(group, return_inverse=True)
    return np.stack([np.bincount(index, weights=values) for values in columns.values()], axis=1)


def _bootstrap(sums_GC: Array, resamples: int, seed: int) -> Array:
    """Column sums of `resamples` draws of G prompts with replacement, `[R, C]`, a few hundred draws at a time."""
    rng, num_groups = np.random.default_rng(seed), len(sums_GC)
    chunks = []
    for start in range(0, resamples, 256):
        size = min(256, resamples - start)
        counts = rng.multinomial(num_groups, np.full(num_groups, 1 / num_groups), size=size)
        chunks.append(counts.astype(np.float64) @ sums_GC)
    return np.concatenate(chunks)


def _ratio(top: Array, bottom: Array) -> Array:
    """`top / bottom`; inf when only the bottom is 0, NaN when both are."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.true_divide(top, bottom)
