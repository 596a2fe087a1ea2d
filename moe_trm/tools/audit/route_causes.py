"""Origin of the routes in a dump: these tokens, or shifted, padded, of another layer, request, or other weights.

The plain model chooses experts for every token by itself. Routes of an engine with the same weights are nearly these:
rounding changes a few. Routes that are not are compared with what the model chose one token earlier or later, in other
layers, and for other rows. The judgement of tokens is that of replay (`routing.judge.token_agreement`).

Shape letters: T tokens of a row less one, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_trm.tools.audit.audit_answer import AuditAnswer
from moe_trm.tools.audit.dump import Array
from moe_trm.tools.audit.power import row_power, token_power, unrelated_shown
from moe_trm.tools.audit.reference import RowScores, illegal
from moe_trm.tools.doctor.causes import ENOUGH, NOTHING, OFTEN
from routing.judge import token_agreement

QUESTION = "routes"
BETTER = 0.2
"""Share of experts by which another explanation must fit better than the stated one."""
DOUBTFUL = 0.75
"""Share of experts that agree below which other explanations are looked for, whatever single tokens say."""
RELATED = 0.15
"""Share of experts above chance from which routes are related to their tokens."""
LEAST_FILLER = 4
"""Rows of filler from which a sequence is called padded; equal tokens may choose alike a few times."""
OF_A_ROW = 7.0
"""Nats against a single row: replay of its own routes would bring it closer."""
OFFSETS = (-2, -1, 1, 2)
MATRIX_TOKENS = 2000
"""Tokens that layers are compared on."""

SENTENCES = {
    "shifted": "They are those of the token {offset} further on: {fit:.0%} of the experts agree, {own:.0%} in place.",
    "padded": "They are filler: an expert twice, an id out of range, or one set repeated against the model's choice.",
    "layer": "They are those of other layers: {layers}. {fit:.0%} of the experts agree, {own:.0%} in place.",
    "request": "They are those of another request: {fit:.0%} of the experts agree with {row}, {own:.0%} in place.",
    "older weights": "They are related to their tokens, and the router had other weights: {own:.0%} of the experts "
    "agree, {chance:.0%} would by chance.",
    "unrelated": "They fit neither their tokens nor those near them, nor a layer or row of the sample: {own:.0%} of "
    "the experts agree, {chance:.0%} would by chance.",
}
"""Causes from the most specific one."""


@dataclass(frozen=True)
class RouteFault:
    """Tokens `start..stop` of a row whose routes are not theirs, and why."""

    row: int
    start: int
    stop: int
    cause: str
    figures: dict[str, float | str]


def overlap(a_TLK: Array, b_TLK: Array) -> Array:
    """`[T, L]` share of the experts of `a` that `b` has."""
    shared: Array = (a_TLK[..., :, None] == b_TLK[..., None, :]).any(-1).mean(-1)
    return shared


def route_faults(scores: Sequence[RowScores], num_experts: int) -> list[RouteFault]:
    """Every row with routes that are not those of its tokens and layers."""
    with_routes = [number for number, row in enumerate(scores) if row.recorded is not None]
    if not with_routes:
        return []
    same = {number: overlap(_recorded(scores[number]), scores[number].live) for number in with_routes}
    regions = _regions(scores, same, num_experts)
    for number in [number for number in with_routes if number not in regions]:
        for start, stop in _row_and_halves(len(same[number])):
            doubtful = same[number][start:stop].mean() < DOUBTFUL
            if doubtful and _explained(scores, number, (start, stop), same)[0] != "none":
                regions[number] = (start, stop)
                break
    clean = [number for number in with_routes if number not in regions]
    layers = _layers(scores, list(regions))
    faults = [_fault(scores, number, region, same, layers, num_experts) for number, region in regions.items()]
    return faults + _wrong_layers(scores, clean, same)


def route_answers(scores: Sequence[RowScores], faults: Sequence[RouteFault], num_experts: int, rows: int, share: float,
                  fix: Callable[[str], str]) -> list[AuditAnswer]:  # fmt: skip
    """An answer for each cause, or that nothing was found. `rows`: of the whole dump."""
    with_routes = [row for row in scores if row.recorded is not None]
    if not with_routes:
        return []
    judged = sum(len(row.live) for row in with_routes)
    _, num_layers, top_k = with_routes[0].live.shape
    chance = 1 - top_k / num_experts
    shown = unrelated_shown(num_layers * top_k, chance)
    by_cause: dict[str, list[RouteFault]] = defaultdict(list)
    for fault in faults:
        by_cause[fault.cause].append(fault)
    answers = []
    for cause, sentence in SENTENCES.items():
        if faults_here := by_cause.get(cause):
            largest = max(faults_here, key=lambda fault: fault.stop - fault.start)
            tokens = sum(fault.stop - fault.start for fault in faults_here)
            names = tuple(dict.fromkeys(scores[fault.row].row.name for fault in faults_here))
            figures = {name: value for name, value in largest.figures.items() if isinstance(value, float)}
            words = sentence.format_map(largest.figures)
            answers.append(AuditAnswer(QUESTION, cause, "fail", words, fix(cause), tokens, judged, names, figures))
    if answers:
        return answers
    agree = float(np.mean([overlap(_recorded(row), row.live).mean() for row in with_routes]))
    excluded = (
        "Excluded: routes that are shifted, padded, of another layer, another request or other weights. Of a fault in "
        f"{share:.0%} of the rows, one is in the sample with {row_power(len(with_routes), rows, share):.1%}; of one in "
        f"{share:.0%} of single tokens, enough disagree with {token_power(judged, share, shown):.1%}."
    )
    words = f"They are those of their tokens: {agree:.1%} of the experts are those that the model chooses."
    return [AuditAnswer(QUESTION, "none", "ok", words, judged=judged, figures={"agree": agree}, excluded=excluded)]


def stale_routes(scores: Sequence[RowScores], faulty: set[int]) -> list[RouteFault]:
    """Rows whose log-probs are those of these weights, and whose routes are not: replaying them makes them worse.

    Where routers differ by rounding or noise it is the other way round: replay brings the two closer.
    """
    rows = [number for number, row in enumerate(scores) if number not in faulty and row.replayed is not None]
    rows = [number for number in rows if scores[number].row.rollout is not None]
    if rows and _made_worse([scores[number] for number in rows], token_agreement.EVIDENCE):
        return [_stale(scores, number) for number in rows]
    return [_stale(scores, number) for number in rows if _made_worse([scores[number]], OF_A_ROW)]


def _made_worse(rows: Sequence[RowScores], evidence: float) -> bool:
    """Far more tokens are farther away with the recorded routes than with the model's own, by `evidence` nats."""
    flipped = np.concatenate([(overlap(_recorded(row), row.live) < 1).reshape(-1) for row in rows])
    native, replayed = (np.concatenate([_distance(row, name) for row in rows]) for name in ("native", "replayed"))
    share = float((replayed > native).mean())
    nats = len(native) * float(token_agreement.kl(np.array(share), np.array(0.5)))
    large = np.median(replayed) > 3 * np.median(native) and np.mean(replayed**2) > NOTHING
    return bool(flipped.mean() >= OFTEN and share > 0.5 and nats >= evidence and large)


def _distance(row: RowScores, name: str) -> Array:
    scored, rollout = getattr(row, name), row.row.rollout
    assert scored is not None
    assert rollout is not None
    distances = [np.abs(scored.full - rollout)]
    if scored.mass is not None:
        distances.append(np.abs(scored.full - scored.mass - rollout))
    best: Array = min(distances, key=lambda distance: float(np.median(distance)))
    return best


def _stale(scores: Sequence[RowScores], number: int) -> RouteFault:
    row = scores[number]
    in_place = float(overlap(_recorded(row), row.live).mean())
    return RouteFault(number, 0, len(row.live), "older weights", {"own": in_place, "chance": _chance(scores, number)})


def _chance(scores: Sequence[RowScores], number: int) -> float:
    """Share of the experts that agree between tokens of the row that have nothing to do with each other."""
    live = scores[number].live
    return float(overlap(live, np.roll(live, len(live) // 2, axis=0)).mean())


def _recorded(row: RowScores) -> Array:
    assert row.recorded is not None
    return row.recorded


def _regions(scores: Sequence[RowScores], same: dict[int, Array], num_experts: int) -> dict[int, tuple[int, int]]:
    """By row, the tokens that disagree with their routes beyond rounding: all of them, or the run that speaks most."""
    numbers = list(same)
    _, num_layers, top_k = _recorded(scores[numbers[0]]).shape
    slots, chance = num_layers * top_k, 1 - top_k / num_experts
    lost_N = np.concatenate([np.rint((1 - same[number]).sum(1) * top_k).astype(np.int64) for number in numbers])
    sizes = [len(same[number]) for number in numbers]
    judged = token_agreement.of_samples(lost_N, np.repeat(np.arange(len(numbers)), sizes), len(numbers), slots, chance)
    regions = {}
    for place, number in enumerate(numbers):
        tokens, unit = sizes[place], token_agreement.UNIT
        share, usual = judged.apart[place] / tokens, judged.expected[place] / unit / tokens
        filler = np.flatnonzero(_filler(scores[number], same[number], num_experts))
        run = judged.run[place] >= token_agreement.EVIDENCE * unit
        if len(filler) >= LEAST_FILLER:
            regions[number] = (int(filler[0]), int(filler[-1]) + 1)
        elif run:
            regions[number] = (int(judged.first[place]), int(judged.last[place]) + 1)
        elif token_agreement.evidence(share, usual, tokens) >= token_agreement.EVIDENCE:
            regions[number] = (0, tokens)
    return regions


def _fault(
    scores: Sequence[RowScores], number: int, region: tuple[int, int], same: dict[int, Array], layers: Array,
    num_experts: int,
) -> RouteFault:  # fmt: skip
    """The cause of one row: filler in its region, else what explains the whole row, its region, or a half of it."""
    row, (start, stop) = scores[number], region
    if _filler(row, same[number], num_experts)[start:stop].mean() >= 0.5:
        return RouteFault(number, start, stop, "padded", {"own": float(same[number][start:stop].mean())})
    whole, *halves = _row_and_halves(len(row.live))
    for start, stop in (whole, region, *halves):
        recorded, in_place = _recorded(row)[start:stop], float(same[number][start:stop].mean())
        cause, fit = _explained(scores, number, (start, stop), same)
        mapped = float(overlap(recorded, row.live[start:stop][:, layers]).mean())
        if mapped >= max(in_place + BETTER, float(fit.get("fit", 0.0))):
            moved = [f"{layer} has {best}" for layer, best in enumerate(layers.tolist()) if layer != best]
            cause, fit = "layer", {"fit": mapped, "layers": ", ".join(moved[:4])}
        if cause != "none":
            return RouteFault(number, start, stop, cause, {"own": in_place, **fit})
    start, stop = region
    in_place, chance = float(same[number][start:stop].mean()), _chance(scores, number)
    cause = "older weights" if in_place >= chance + RELATED else "unrelated"
    return RouteFault(number, start, stop, cause, {"own": in_place, "chance": chance})


def _row_and_halves(tokens: int) -> tuple[tuple[int, int], ...]:
    return (0, tokens), (tokens // 2, tokens), (0, tokens // 2)


def _explained(
    scores: Sequence[RowScores], number: int, region: tuple[int, int], same: dict[int, Array]
) -> tuple[str, dict[str, float | str]]:
    """The neighbouring token or the other row that explains the routes better than their own tokens do."""
    start, stop = region
    recorded, live = _recorded(scores[number]), scores[number].live
    best, figures = float(same[number][start:stop].mean()) + BETTER, dict[str, float | str]()
    cause = "none"
    for offset in OFFSETS:
        first, last = max(start, -offset), min(stop, len(live) - offset)
        if last - first < ENOUGH:
            continue
        fit = float(overlap(recorded[first:last], live[first + offset : last + offset]).mean())
        if fit >= best:
            best, cause, figures = fit, "shifted", {"fit": fit, "offset": f"{offset:+d}"}
    for place, candidate in enumerate(scores):
        last = min(stop, len(candidate.live))
        if place == number or last - start < ENOUGH:
            continue
        fit = float(overlap(recorded[start:last], candidate.live[start:last]).mean())
        if fit >= best:
            best, cause, figures = fit, "request", {"fit": fit, "row": candidate.row.name}
    return cause, figures


def _filler(row: RowScores, same_TL: Array, num_experts: int) -> Array:
    """`[T]` bool: illegal rows, and rows that repeat the one before although the model chooses others."""
    recorded = _recorded(row)
    repeats = np.zeros(len(recorded), bool)
    repeats[1:] = (recorded[1:] == recorded[:-1]).all((1, 2)) & (same_TL[1:].mean(1) < DOUBTFUL)
    result: Array = illegal(recorded, num_experts).any(1) | repeats
    return result


def _pairs(scores: Sequence[RowScores], numbers: Sequence[int]) -> Array:
    """`[L, L]` share of the recorded experts of a layer that the model chooses in each layer."""
    recorded = np.concatenate([_recorded(scores[number]) for number in numbers])
    live = np.concatenate([scores[number].live for number in numbers])
    step = max(1, len(live) // MATRIX_TOKENS)
    recorded, live = recorded[::step], live[::step]
    columns = range(live.shape[1])
    return np.array([[overlap(recorded[:, a], live[:, b]).mean() for b in columns] for a in columns])


def _layers(scores: Sequence[RowScores], numbers: Sequence[int]) -> Array:
    """`[L]` the layer that fits the recorded routes of each layer best."""
    if not numbers:
        return np.zeros(0, np.int64)
    best: Array = _pairs(scores, numbers).argmax(1)
    return best


def _wrong_layers(scores: Sequence[RowScores], numbers: Sequence[int], same: dict[int, Array]) -> list[RouteFault]:
    """Single layers whose routes are those of another one, in rows whose tokens agree in most layers."""
    if sum(len(same[number]) for number in numbers) < ENOUGH:
        return []
    pairs = _pairs(scores, numbers)
    in_place, best = np.diag(pairs), pairs.argmax(1)
    moved = [layer for layer in range(len(pairs)) if pairs[layer, best[layer]] >= in_place[layer] + BETTER]
    if not moved:
        return []
    figures: dict[str, float | str] = {
        "own": float(in_place[moved].mean()),
        "fit": float(pairs[moved, best[moved]].mean()),
        "layers": ", ".join(f"{layer} has {best[layer]}" for layer in moved[:4]),
    }
    return [RouteFault(number, 0, len(same[number]), "layer", figures) for number in numbers]
