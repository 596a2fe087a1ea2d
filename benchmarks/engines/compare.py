"""Two sides on the same tokens: flips by stratum, and log-prob differences with and without replayed routes.

Shape letters: N scored tokens of all texts, L MoE layers, K experts per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.engines.scored import Scored, Text
from moe_trm.errors import MoeTrmError
from moe_trm.step.probe.pooled import Interval, PooledTokens, intervals, pooled
from routing.judge.flips import flips, gate_weight_shift

POSITIONS = (8, 16, 24, 32, 64, 256, 1024)
MARGINS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


@dataclass(frozen=True)
class Stratum:
    """Flip rate of a class of token-layers, and how many there are."""

    rate: Interval
    token_layers: int


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`.

    Attributes:
        num_tokens: scored tokens.
        pooled: figures with intervals; `replayed` ones only where side B replayed.
        expert_delta: mean over experts of the chance that one side uses the expert and the other does not.
        strata: `layer`, `position` (from the start of the sequence) and `router margin`: class -> its flips.
        local_flips: share of replayed token-layers whose live router would have chosen another set; None without
            replay.
        gate_weight_shift: mean of |w_A - w_B| over the experts that both chose; None where an engine reports no
            weights.
    """

    num_tokens: int
    pooled: Mapping[str, Interval]
    expert_delta: float
    strata: Mapping[str, Mapping[str, Stratum]]
    local_flips: float | None
    gate_weight_shift: float | None


def compare(
    texts: Sequence[Text],
    a: Sequence[Scored],
    native: Sequence[Scored],
    replayed: Sequence[Scored] | None,
    margins: Sequence[Scored],
    local_flips: float | None = None,
) -> Comparison:
    """Compare side A with side B's native and replayed scores on the sampled tokens; `margins` are of B's weights.

    Raises:
        MoeTrmError: a log-prob that is not finite.
    """
    keep = [text.rows for text in texts]
    routes_a, routes_b = (
        np.concatenate([scored.routes.experts[rows] for scored, rows in zip(side, keep, strict=True)])
        for side in (a, native)
    )
    native_N = _difference(native, a, keep)
    replayed_N = native_N if replayed is None else _difference(replayed, a, keep)
    if not (np.isfinite(native_N).all() and np.isfinite(replayed_N).all()):
        raise MoeTrmError(
            "an engine gave log-probs that are not finite", got=f"{(~np.isfinite(native_N)).sum()} of {len(native_N)}"
        )
    group = np.concatenate([np.full(rows.sum(), text.prompt) for text, rows in zip(texts, keep, strict=True)])
    route_flips = flips(routes_a, routes_b, num_experts=a[0].routes.num_experts)
    flipped_NL = ~(routes_a[..., :, None] == routes_b[..., None, :]).any(-1).all(-1)
    figures = dict(pooled(PooledTokens(group, native_N, replayed_N, flipped_NL.sum(1)), num_layers=flipped_NL.shape[1]))
    if replayed is None:
        figures = {name: value for name, value in figures.items() if "replayed" not in name and "reduction" not in name}
    figures |= _more(routes_a, routes_b, native_N, replayed_N, group, with_replay=replayed is not None)
    position = np.concatenate([np.flatnonzero(rows) for rows in keep])
    margin_NL = np.concatenate([_margins(scored)[rows] for scored, rows in zip(margins, keep, strict=True)])
    layer_NL = np.broadcast_to(np.arange(flipped_NL.shape[1]), flipped_NL.shape)
    return Comparison(
        num_tokens=len(native_N),
        pooled=figures,
        expert_delta=route_flips.expert_delta,
        strata={
            "layer": _strata(flipped_NL, layer_NL, [str(layer) for layer in a[0].routes.layer_ids], group),
            "position": _strata(flipped_NL, np.digitize(position, POSITIONS), _classes(POSITIONS), group),
            "router margin": _strata(flipped_NL, np.digitize(margin_NL, MARGINS), _classes(MARGINS), group),
        },
        local_flips=local_flips,
        gate_weight_shift=_weight_shift(a, native, keep),
    )


def _difference(side: Sequence[Scored], a: Sequence[Scored], keep: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(
        [(scored.logprobs - baseline.logprobs)[rows] for scored, baseline, rows in zip(side, a, keep, strict=True)]
    )


def _more(
    routes_a: np.ndarray,
    routes_b: np.ndarray,
    native_N: np.ndarray,
    replayed_N: np.ndarray,
    group: np.ndarray,
    *,
    with_replay: bool,
) -> dict[str, Interval]:
    """Overlap loss and mean absolute differences, with intervals."""
    shared = (routes_a[..., :, None] == routes_b[..., None, :]).any(-1).mean((1, 2))
    columns = {
        "one": np.ones(len(native_N)),
        "loss": 1 - shared,
        "own": np.abs(native_N),
        "forced": np.abs(replayed_N),
        "moved": np.abs(native_N - replayed_N),
    }
    figures = {"overlap_loss": ("loss", "one", 1.0), "native_abs_mean": ("own", "one", 1.0)}
    if with_replay:
        figures |= {"replayed_abs_mean": ("forced", "one", 1.0), "routing_abs_mean": ("moved", "one", 1.0)}
    return intervals(columns, figures, group)


def _strata(flipped_NL: np.ndarray, place: np.ndarray, names: Sequence[str], group: np.ndarray) -> dict[str, Stratum]:
    """Flip rate of each class that occurs, with intervals over groups.

    `place` is the class of each token, or of each token-layer.
    """
    place_NL = np.broadcast_to(place.reshape(len(place), -1), flipped_NL.shape)
    columns, figures = dict[str, np.ndarray](), dict[str, tuple[str, str, float]]()
    for number, name in enumerate(names):
        inside_NL = place_NL == number
        columns |= {f"{name}/all": inside_NL.sum(1), f"{name}/flips": (inside_NL & flipped_NL).sum(1)}
        figures[name] = f"{name}/flips", f"{name}/all", 1.0
    rates = intervals(columns, figures, group)
    return {name: Stratum(rate, int(columns[f"{name}/all"].sum())) for name, rate in rates.items()}


def _classes(edges: Sequence[float]) -> list[str]:
    between = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    return [f"below {edges[0]:g}", *between, f"{edges[-1]:g} and up"]


def _margins(scored: Scored) -> np.ndarray:
    assert scored.margins is not None, "Hugging Face reports its margins"
    return scored.margins


def _weight_shift(a: Sequence[Scored], b: Sequence[Scored], keep: Sequence[np.ndarray]) -> float | None:
    shifts = []
    for scored_a, scored_b, rows in zip(a, b, keep, strict=True):
        if scored_a.weights is None or scored_b.weights is None:
            return None
        parts = [
            torch.from_numpy(part[rows].reshape(-1, scored_a.routes.top_k).astype(np.float64))
            for part in (scored_a.routes.experts, scored_a.weights, scored_b.routes.experts, scored_b.weights)
        ]
        shifts.append(gate_weight_shift(*parts).numpy())
    return float(np.nanmean(np.concatenate(shifts)))
