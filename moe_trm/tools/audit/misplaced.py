"""Log-probs that belong to other tokens: shifted along their row, or those of another row.

An index error leaves the right numbers at the wrong tokens. In place they look like other weights.

Shape letter: S sampled tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_trm.tools.audit.dump import Array
from moe_trm.tools.doctor.causes import ENOUGH

CLOSER = 0.2
"""Share of the median distance in place up to which other tokens explain log-probs."""
OFFSETS = (-2, -1, 1, 2)
SENTENCES = {
    "shifted log-probs": "They are those of the token {offset:+d} further on, in {rows} of {judged} rows: the median "
    "distance to the model is {moved:.1e} nats there and {in_place:.1e} in place.",
    "log-probs of another row": "They are those of other rows, in {rows} of {judged} rows: the median distance to the "
    "model is {moved:.1e} nats there and {in_place:.1e} in place.",
}


@dataclass(frozen=True)
class Misplaced:
    """The cause, its sentence, and the places of the rows that it explains."""

    cause: str
    sentence: str
    rows: tuple[int, ...]


def misplaced(values: Sequence[Array], model: Sequence[Array]) -> Misplaced | None:
    """The other tokens to which the log-probs of most of these rows belong; None where no other tokens explain them.

    Args:
        values: `[S]` log-probs of an engine, row by row.
        model: `[S]` of the plain model for the same rows.
    """
    causes: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for place, row_values in enumerate(values):
        in_place = _distance(row_values, model[place])
        moved, cause, offset = min(_elsewhere(place, row_values, model), default=(np.inf, "", 0))
        if moved <= CLOSER * in_place:
            causes.setdefault((cause, offset), []).append((place, moved, in_place))
    if not causes:
        return None
    (cause, offset), rows = max(causes.items(), key=lambda item: len(item[1]))
    if 2 * len(rows) < len(values):
        return None
    figures = {"moved": np.median([moved for _, moved, _ in rows]), "in_place": np.median([own for *_, own in rows])}
    sentence = SENTENCES[cause].format(offset=offset, rows=len(rows), judged=len(values), **figures)
    return Misplaced(cause, sentence, tuple(place for place, *_ in rows))


def _elsewhere(place: int, values: Array, model: Sequence[Array]) -> list[tuple[float, str, int]]:
    """Distance, cause and offset of every other explanation."""
    distances = []
    for offset in OFFSETS:
        first, last = max(0, -offset), min(len(values), len(values) - offset)
        if last - first >= ENOUGH:
            distance = _distance(values[first:last], model[place][first + offset : last + offset])
            distances.append((distance, "shifted log-probs", offset))
    for number, of_row in enumerate(model):
        size = min(len(values), len(of_row))
        if number != place and size >= ENOUGH:
            distances.append((_distance(values[:size], of_row[:size]), "log-probs of another row", 0))
    return distances


def _distance(values: Array, model: Array) -> float:
    return float(np.median(np.abs(values - model)))
