"""The rise of a mismatch between two checkpoints, split without remainder.

Let E(s, w) be the mean of a figure over the tokens of texts s, with both engines at weights w, each 0 (then) or 1
(now). Let R(s) be the same figure of what the run itself recorded of texts s. Then

    R(1) - R(0) =   E(1, 0) - E(0, 0)                        other texts
                  + E(0, 1) - E(0, 0)                        other weights, the same texts
                  + E(1, 1) - E(1, 0) - E(0, 1) + E(0, 0)    interaction
                  + D(1) - D(0)                              with D(s) = R(s) - E(s, s), token by token

D is the sum of three: `scoring` (the run's learner scores against those that its checkpoint gives again), and the
recorded log-probs and routes against those of a server that was given the checkpoint: `push` of tokens whose label is
that of the checkpoint, `staleness` of tokens with an older one.

*Other texts* are split by Shapley values over length, position and entropy. Let c be a class of tokens by some of the
three (quarters of all tokens each), p_s(c) its share in texts s, and m(c) its mean under the weights of then. The value
of these is sum_c (p_1(c) - p_0(c)) m(c), and what all three leave is `content`.

*Other weights* are split by what replay removes: k3 = (k3 - replayed k3) + replayed k3, routing and numerics. Numerics
are U Q, where U is the k3 that one rounding of the last hidden state to bfloat16 makes: how much the output amplifies.
U(1) Q(1) - U(0) Q(0) = (U(1) - U(0)) (Q(0) + Q(1)) / 2 + (Q(1) - Q(0)) (U(0) + U(1)) / 2, `output` and `rounding`.
The flip rate is sum_b p(b) f(b) over classes b of router margins, split likewise: `margins` is what the shares make,
`noise` what the rates within classes make.

Source: Shapley (1953); Kitagawa (1955) for products of shares and rates. Intervals are percentiles of a bootstrap over
prompts, of then and of now apart. Shape letters: N tokens, G prompts, R resamples (the first is the data itself), L MoE
layers, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moe_trm.step.probe.pooled import Interval, k3

Array = NDArray[Any]
Figure = Literal["k3", "tail", "flips"]
FIGURES: tuple[Figure, ...] = ("k3", "tail", "flips")
TRAITS = ("length", "position", "entropy")
CLASSES = 4
MARGIN_EDGES = 10.0 ** np.arange(-8, 0.5, 0.5)
"""Ends of the classes of router margins, in the router's scores; NaN, of routers without margins, is a class too."""
RESAMPLES, CONFIDENCE = 1000, 0.95


@dataclass(frozen=True)
class CellTokens:
    """Scored tokens of one set of texts, both engines at the same weights. Log-ratios are learner minus server, nats.

    Attributes:
        native, replayed: `[N]` log-ratio with the learner's own routes, and with the server's.
        flipped: `[N, L]` bool, the engines' routers chose other sets; margins: `[N, L]` of the learner's router.
        entropy: `[N]` of the learner's policy; unit: `[N]` k3 of one rounding of the last hidden state; NaN: unknown.
        scale: `[N]` root mean square of the residual stream before the last norm; NaN: unknown.
    """

    native: Array
    replayed: Array
    flipped: Array
    margins: Array
    entropy: Array
    unit: Array
    scale: Array


@dataclass(frozen=True)
class TextTokens:
    """The same tokens as the run saw them.

    Attributes:
        group: `[N]` prompt; length: `[N]` tokens of the text; position: `[N]` tokens before this one.
        stale: `[N]` bool, sampled by weights older than the checkpoint's.
        sampled: `[N]` log-ratio of the checkpoint's learner to the recorded log-prob.
        recorded: `[N]` the same of the run's own learner scores.
        flipped: `[N, L]` bool, recorded routes against those of the checkpoint's learner.
        measured: False where the recorded log-probs cannot be compared; then the last three are those of the cell.
        scored: True where the run's own learner scores are known; else `recorded` is `sampled`.
    """

    group: Array
    length: Array
    position: Array
    stale: Array
    sampled: Array
    recorded: Array
    flipped: Array
    measured: bool = True
    scored: bool = True

    def __len__(self) -> int:
        return len(self.group)


@dataclass(frozen=True)
class RisePart:
    """One part of a rise: its name, its detail (empty: not split further), and its size with an interval."""

    name: str
    detail: str
    size: Interval


@dataclass(frozen=True)
class Rise:
    """The rise of one figure, and its parts, whose sum it is. `facts`: means of then and of now by name."""

    figure: Figure
    then: Interval
    now: Interval
    total: Interval
    parts: tuple[RisePart, ...]


def split(
    texts: Sequence[TextTokens], cells: Sequence[Sequence[CellTokens]], *, replays: bool, seed: int = 0
) -> tuple[tuple[Rise, ...], dict[str, tuple[float, float]]]:
    """The rises of k3, of the tail (share of ratios beyond 2, either way) and of the flip rate.

    Args:
        texts: of then and of now; `cells[s][w]`: texts s under weights w.
        replays: the run's learner replays the server's routes, so its mismatch is that with replayed routes.

    Returns:
        Rises, and facts: means of then and of now by name. `weights/NAME` are of the same texts, those of then.
    """
    classes, counts = _classes(texts, [cells[s][0] for s in (0, 1)])
    sums = []
    for s, number in enumerate((seed, seed + 1)):
        columns = _columns(texts[s], cells[s], s, classes[s], counts, replays=replays)
        sums.append(PromptSums(columns, texts[s].group, number))
    rises = tuple(_rise(figure, sums[0], sums[1], counts, replays=replays) for figure in FIGURES)
    return rises, _facts(texts, sums[0], sums[1])


class PromptSums:
    """Sums `[R]` of columns `[N]` over resampled prompts."""

    def __init__(self, columns: Mapping[str, Array], group: Array, seed: int) -> None:
        _, prompt = np.unique(group, return_inverse=True)
        num_prompts = int(prompt.max()) + 1
        by_prompt = np.stack(
            [np.bincount(prompt, weights=values, minlength=num_prompts) for values in columns.values()]
        )
        rng = np.random.default_rng(seed)
        drawn = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=RESAMPLES)
        weights_RG = np.concatenate([np.ones((1, num_prompts)), drawn])
        self._sums_CR = by_prompt @ weights_RG.T
        self._places = {name: place for place, name in enumerate(columns)}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def sum(self, name: str) -> Array:
        values: Array = self._sums_CR[self._places[name]]
        return values

    def mean(self, name: str) -> Array:
        values: Array = self.sum(name) / self.sum("count")
        return values

    def classes(self, name: str, number: int) -> Array:
        """`[R, C]` sums of the columns `name/0` to `name/number - 1`."""
        return np.stack([self.sum(f"{name}/{c}") for c in range(number)], axis=1)


def figures_of(log_ratio: Array, flipped: Array) -> dict[Figure, Array]:
    """`[N]` values whose means are the three figures."""
    return {
        "k3": k3(log_ratio),
        "tail": (np.abs(log_ratio) > np.log(2)).astype(float),
        "flips": flipped.mean(axis=1) if flipped.shape[1] else np.zeros(len(log_ratio)),
    }


def _columns(
    texts: TextTokens, cells: Sequence[CellTokens], s: int, classes: Array, counts: int, *, replays: bool
) -> dict[str, Array]:
    columns: dict[str, Array] = {"count": np.ones(len(texts)), "stale": texts.stale, "length": texts.length}
    columns["position"] = texts.position
    values = [figures_of(cell.replayed if replays else cell.native, cell.flipped) for cell in cells]
    for w, cell in enumerate(cells):
        columns |= {f"{figure}@{w}": values[w][figure] for figure in FIGURES}
        numerics = figures_of(cell.replayed, cell.flipped)
        columns |= {f"numerics_{figure}@{w}": numerics[figure] for figure in ("k3", "tail")}
        columns |= {f"{name}@{w}": getattr(cell, name) for name in ("unit", "entropy", "scale")}
        columns |= _margin_columns(cell, w)
    sampled = figures_of(texts.sampled, texts.flipped)
    recorded = figures_of(texts.recorded, texts.flipped)
    for figure in FIGURES:
        gap = sampled[figure] - values[s][figure]
        columns[f"{figure}:push"] = np.where(texts.stale, 0.0, gap)
        columns[f"{figure}:staleness"] = np.where(texts.stale, gap, 0.0)
        columns[f"{figure}:scoring"] = recorded[figure] - sampled[figure]
        columns |= {f"class_{figure}/{c}": values[0][figure] * (classes == c) for c in range(counts)}
    return columns | {f"class/{c}": (classes == c).astype(float) for c in range(counts)}


def _margin_columns(cell: CellTokens, w: int) -> dict[str, Array]:
    """By class of margin: its share of a token's layers, and the flipped part of that share."""
    known = ~np.isnan(cell.margins)
    place_NL = np.where(known, 1 + np.searchsorted(MARGIN_EDGES, np.where(known, cell.margins, 0.0)), 0)
    num_layers = max(place_NL.shape[1], 1)
    columns = {}
    for b in range(len(MARGIN_EDGES) + 2):
        inside = place_NL == b
        columns[f"margin@{w}/{b}"] = inside.sum(1) / num_layers
        columns[f"margin_flips@{w}/{b}"] = (inside & cell.flipped).sum(1) / num_layers
    return columns


def _classes(texts: Sequence[TextTokens], cells: Sequence[CellTokens]) -> tuple[list[Array], int]:
    """Of each set of texts `[N]` classes of tokens by all three traits, and how many there are."""
    values = [
        {"length": part.length, "position": part.position, "entropy": cell.entropy}
        for part, cell in zip(texts, cells, strict=True)
    ]
    numbers = [np.zeros(len(part), np.int64) for part in texts]
    for trait in TRAITS:
        both = np.concatenate([part[trait] for part in values]).astype(float)
        edges = np.quantile(both, np.arange(1, CLASSES) / CLASSES) if np.isfinite(both).all() else np.zeros(0)
        for s in (0, 1):
            numbers[s] = numbers[s] * CLASSES + np.searchsorted(edges, values[s][trait])
    return numbers, CLASSES ** len(TRAITS)


def _rise(figure: Figure, then: PromptSums, now: PromptSums, counts: int, *, replays: bool) -> Rise:
    cell = {(s, w): sums.mean(f"{figure}@{w}") for s, sums in enumerate((then, now)) for w in (0, 1)}
    parts: dict[tuple[str, str], Array] = {}
    parts |= {("texts", trait): value for trait, value in _of_texts(figure, then, now, counts).items()}
    parts |= {("weights", detail): value for detail, value in _of_weights(figure, then, replays=replays).items()}
    parts["interaction", ""] = cell[1, 1] - cell[1, 0] - cell[0, 1] + cell[0, 0]
    differences = {
        name: now.mean(f"{figure}:{name}") - then.mean(f"{figure}:{name}") for name in ("push", "staleness", "scoring")
    }
    parts |= {(name, ""): value for name, value in differences.items()}
    gaps = [sum(sums.mean(f"{figure}:{name}") for name in differences) for sums in (then, now)]
    ends = [cell[s, s] + gaps[s] for s in (0, 1)]
    return Rise(
        figure,
        _interval(ends[0]),
        _interval(ends[1]),
        _interval(ends[1] - ends[0]),
        tuple(RisePart(name, detail, _interval(value)) for (name, detail), value in parts.items()),
    )


def _of_texts(figure: Figure, then: PromptSums, now: PromptSums, counts: int) -> dict[str, Array]:
    """Shapley values of the traits, and the rest."""
    shape = (-1, *(CLASSES,) * len(TRAITS))
    tokens = [sums.classes("class", counts).reshape(shape) for sums in (then, now)]
    totals = [sums.classes(f"class_{figure}", counts).reshape(shape) for sums in (then, now)]

    def value(traits: tuple[int, ...]) -> Array:
        hidden = tuple(axis + 1 for axis in range(len(TRAITS)) if axis not in traits)
        counted = [part.sum(axis=hidden).reshape(len(part), -1) for part in tokens]
        summed = sum(part.sum(axis=hidden).reshape(len(part), -1) for part in totals)
        means = summed / np.maximum(counted[0] + counted[1], 1e-300)
        shares = [part / part.sum(axis=1, keepdims=True) for part in counted]
        result: Array = ((shares[1] - shares[0]) * means).sum(axis=1)
        return result

    size, parts = len(TRAITS), dict[str, Array]()
    values = {traits: value(traits) for count in range(size + 1) for traits in combinations(range(size), count)}
    for axis, trait in enumerate(TRAITS):
        parts[trait] = np.zeros_like(values[()])
        for traits, of_traits in values.items():
            if axis not in traits:
                weight = factorial(len(traits)) * factorial(size - len(traits) - 1) / factorial(size)
                parts[trait] += weight * (values[tuple(sorted((*traits, axis)))] - of_traits)
    rise = now.mean(f"{figure}@0") - then.mean(f"{figure}@0")
    return {**parts, "content": rise - values[tuple(range(size))]}


def _of_weights(figure: Figure, then: PromptSums, *, replays: bool) -> dict[str, Array]:
    if figure == "flips":
        return _of_margins(then)
    before, after = (then.mean(f"numerics_{figure}@{w}") for w in (0, 1))
    parts = {}
    if not replays:
        parts["routing"] = (then.mean(f"{figure}@1") - after) - (then.mean(f"{figure}@0") - before)
    units = [then.mean(f"unit@{w}") for w in (0, 1)]
    if figure != "k3" or not all((unit > 0).all() for unit in units):
        return {**parts, "numerics": after - before}
    rates = before / units[0], after / units[1]
    return {
        **parts,
        "output": (units[1] - units[0]) * (rates[0] + rates[1]) / 2,
        "rounding": (rates[1] - rates[0]) * (units[0] + units[1]) / 2,
    }


def _of_margins(then: PromptSums) -> dict[str, Array]:
    """What margins that closed make of the flips, and what routers make that flip more often at the same margins."""
    number = len(MARGIN_EDGES) + 2
    shares = [then.classes(f"margin@{w}", number) / then.sum("count")[:, None] for w in (0, 1)]
    flips = [then.classes(f"margin_flips@{w}", number) / then.sum("count")[:, None] for w in (0, 1)]
    rates = [np.divide(part, share, out=np.zeros_like(part), where=share > 0) for part, share in zip(flips, shares)]  # noqa: B905
    # A class without tokens has no rate: the difference is then all of the shares.
    before = np.where(shares[0] > 0, rates[0], rates[1])
    after = np.where(shares[1] > 0, rates[1], rates[0])
    return {
        "margins": ((shares[1] - shares[0]) * (before + after) / 2).sum(axis=1),
        "noise": ((after - before) * (shares[0] + shares[1]) / 2).sum(axis=1),
    }


def _interval(values_R: Array) -> Interval:
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values_R[1:], [outside, 100 - outside])
    return Interval(float(values_R[0]), float(low), float(high))


def _facts(texts: Sequence[TextTokens], then: PromptSums, now: PromptSums) -> dict[str, tuple[float, float]]:
    facts = {name: (float(then.mean(name)[0]), float(now.mean(name)[0])) for name in ("length", "position", "stale")}
    facts["entropy"] = float(then.mean("entropy@0")[0]), float(now.mean("entropy@0")[0])
    names = ("k3", "flips", "numerics_k3", "unit", "entropy", "scale")
    facts |= {f"weights/{name}": (float(then.mean(f"{name}@0")[0]), float(then.mean(f"{name}@1")[0])) for name in names}
    number = len(MARGIN_EDGES) + 2
    shares = [then.classes(f"margin@{w}", number)[0] / len(texts[0]) for w in (0, 1)]
    flips = [then.classes(f"margin_flips@{w}", number)[0] for w in (0, 1)]
    # The engines' noise in the router: the class up to which nine in ten flips of then happen.
    total = np.cumsum(flips[0]) if flips[0].sum() else np.cumsum(flips[1])
    close = int(np.searchsorted(total, 0.9 * total[-1])) if total[-1] else 0
    if close:
        facts["weights/margin_limit"] = (float(MARGIN_EDGES[min(close - 1, len(MARGIN_EDGES) - 1)]),) * 2
        facts["weights/close"] = float(shares[0][1 : close + 1].sum()), float(shares[1][1 : close + 1].sum())
    return facts
