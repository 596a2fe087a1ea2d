"""The split of a rise: its parts make all of it, and each planted growth is named, on made-up tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from moe_trm.tools.growth.examine import Growth, judge
from moe_trm.tools.growth.sentences import cause_of
from moe_trm.tools.growth.split import Array, CellTokens, TextTokens

PROMPTS, LAYERS, ROUNDING = 40, 4, 0.01
Cells = list[list[CellTokens]]
Texts = list[TextTokens]
Plant = Callable[[Texts, Cells], None]


def text_tokens(seed: int, length: int = 50) -> TextTokens:
    rng = np.random.default_rng(seed)
    lengths = np.repeat(rng.integers(length // 2, length, PROMPTS), length)
    number = PROMPTS * length
    return TextTokens(
        group=np.repeat(np.arange(PROMPTS), length),
        length=lengths,
        position=np.tile(np.arange(length), PROMPTS),
        stale=np.zeros(number, bool),
        sampled=np.zeros(number),
        recorded=np.zeros(number),
        flipped=np.zeros((number, LAYERS), bool),
    )


def cell_tokens(texts: TextTokens, seed: int) -> CellTokens:
    """Rounding of a fixed size, which flips where margins are small; flips add to the log-ratio."""
    rng, number = np.random.default_rng(seed), len(texts)
    margins = rng.random((number, LAYERS))
    flipped = margins < 0.02
    replayed = ROUNDING * rng.standard_normal(number)
    return CellTokens(
        native=replayed + 0.01 * flipped.sum(1) * rng.standard_normal(number),
        replayed=replayed,
        flipped=flipped,
        margins=margins,
        entropy=rng.random(number),
        unit=np.full(number, 1e-5),
        scale=np.ones(number),
    )


def grown(plant: Plant | None, *, length: int = 50, replays: bool = False) -> Growth:
    """Two sets of texts under the same weights, with a growth planted between them."""
    texts = [text_tokens(1), text_tokens(2, length)]
    cells = [[cell_tokens(part, 10 + s)] * 2 for s, part in enumerate(texts)]
    if plant is not None:
        plant(texts, cells)
    for s, part in enumerate(texts):
        ratio = cells[s][s].replayed if replays else cells[s][s].native
        gap = part.sampled, part.recorded
        flipped = np.where(part.flipped.any(), part.flipped, cells[s][s].flipped)
        texts[s] = replace(part, sampled=ratio + gap[0], recorded=ratio + gap[0] + gap[1], flipped=flipped)
    return judge((10, 20), texts, cells, (PROMPTS, PROMPTS), replays=replays)


def noise(number: int, size: float) -> Array:
    return size * np.random.default_rng(99).standard_normal(number)


def both(cells: Cells, change: Callable[[CellTokens], CellTokens]) -> None:
    for row in cells:
        row[1] = change(row[1])


def sharper(texts: Texts, cells: Cells) -> None:
    def change(cell: CellTokens) -> CellTokens:
        return replace(cell, native=3 * cell.native, replayed=3 * cell.replayed, unit=9 * cell.unit)

    both(cells, change)


def coarser(texts: Texts, cells: Cells) -> None:
    both(cells, lambda cell: replace(cell, native=3 * cell.native, replayed=3 * cell.replayed))


def closing(texts: Texts, cells: Cells) -> None:
    def change(cell: CellTokens) -> CellTokens:
        margins = cell.margins / 20
        flipped = margins < 0.02
        extra = flipped.sum(1) - cell.flipped.sum(1)
        return replace(cell, margins=margins, flipped=flipped, native=cell.native + noise(len(extra), 0.03) * extra)

    both(cells, change)


def longer(texts: Texts, cells: Cells) -> None:
    """Log-ratios that grow with the position, under all weights."""
    for s, part in enumerate(texts):
        factor = 1 + part.position / 10
        cells[s] = [replace(cell, native=cell.native * factor, replayed=cell.replayed * factor) for cell in cells[s]]


def uncertain(texts: Texts, cells: Cells) -> None:
    for s in (0, 1):
        entropy = cells[s][0].entropy + s
        cells[s] = [replace(cell, entropy=entropy, native=cell.native * (1 + 3 * entropy)) for cell in cells[s]]


def lost_layer(texts: Texts, cells: Cells) -> None:
    texts[1] = replace(texts[1], sampled=noise(len(texts[1]), 0.3))


def older(texts: Texts, cells: Cells) -> None:
    number = len(texts[1])
    texts[1] = replace(texts[1], sampled=noise(number, 0.3), stale=np.ones(number, bool))


def shifted(texts: Texts, cells: Cells) -> None:
    texts[1] = replace(texts[1], recorded=noise(len(texts[1]), 0.8))


PLANTED: dict[str, tuple[Plant, int, tuple[str, set[str]]]] = {
    "sharper policy": (sharper, 50, ("weights", {"output"})),
    "coarser rounding": (coarser, 50, ("weights", {"rounding"})),
    "closing margins": (closing, 50, ("weights", {"routing"})),
    "longer texts": (longer, 150, ("texts", {"position", "length"})),
    "less certain texts": (uncertain, 50, ("texts", {"entropy"})),
    "a push that loses a layer": (lost_layer, 50, ("push", {""})),
    "older samples": (older, 50, ("staleness", {""})),
    "an index error in scoring": (shifted, 50, ("scoring", {""})),
}


@pytest.mark.parametrize("name", list(PLANTED))
def test_each_planted_growth_is_named(name: str) -> None:
    plant, length, (part, details) = PLANTED[name]
    growth = grown(plant, length=length)
    cause = cause_of(growth.rises[0])
    assert cause is not None, [check.says for check in growth.checks]
    assert cause.name == part
    assert cause.detail in details
    assert "It grows because" in growth.checks[0].says


def test_flips_by_closing_margins_are_told_from_noisier_routers() -> None:
    def noisier(texts: Texts, cells: Cells) -> None:
        both(cells, lambda cell: replace(cell, flipped=cell.margins < 0.2))

    for plant, detail in ((closing, "margins"), (noisier, "noise")):
        cause = cause_of(grown(plant).rises[2])
        assert cause is not None
        assert (cause.name, cause.detail) == ("weights", detail)


def test_what_the_interaction_takes_back_is_no_cause() -> None:
    def only_on_the_old_texts(texts: Texts, cells: Cells) -> None:
        lost_layer(texts, cells)
        both(cells[:1], lambda cell: replace(cell, native=100 * cell.native, replayed=100 * cell.replayed))

    cause = cause_of(grown(only_on_the_old_texts).rises[0])
    assert cause is not None
    assert cause.name == "push"


@pytest.mark.parametrize("plant", [None, *(plant for plant, _, _ in PLANTED.values())])
@pytest.mark.parametrize("replays", [False, True])
def test_the_parts_make_the_whole_rise(plant: Plant | None, *, replays: bool) -> None:
    for rise in grown(plant, length=70, replays=replays).rises:
        total = sum(part.size.value for part in rise.parts)
        assert total == pytest.approx(rise.total.value, rel=1e-9, abs=1e-15)
        assert rise.now.value - rise.then.value == pytest.approx(rise.total.value, rel=1e-9, abs=1e-15)


def test_the_same_weights_and_a_faithful_push_give_zero() -> None:
    """Learning rate 0: the texts differ by chance alone."""
    growth = grown(None)
    for rise in growth.rises:
        assert cause_of(rise) is None
        for part in rise.parts:
            if part.name == "texts":
                assert part.size.low <= 0 <= part.size.high, part
            else:
                assert part.size.value == part.size.low == part.size.high == 0, part
    assert all("did not grow" in check.says for check in growth.checks)


def test_what_was_not_measured_is_no_zero() -> None:
    def unknown(texts: Texts, cells: Cells) -> None:
        texts[0] = replace(texts[0], measured=False)

    growth = grown(unknown)
    assert {part.name for part in growth.rises[0].parts} == {"texts", "weights", "interaction"}
    assert "not measured: push, scoring, staleness" in growth.checks[0].says


def test_a_model_without_margins_or_hidden_states_is_split_less_far() -> None:
    def blind(texts: Texts, cells: Cells) -> None:
        def change(cell: CellTokens) -> CellTokens:
            nothing = np.full(len(cell.unit), np.nan)
            return replace(cell, unit=nothing, entropy=nothing, margins=np.full_like(cell.margins, np.nan))

        for s in (0, 1):
            cells[s] = [change(cells[s][0]), change(cells[s][1])]

    def both_planted(texts: Texts, cells: Cells) -> None:
        coarser(texts, cells)
        blind(texts, cells)

    cause = cause_of(grown(both_planted).rises[0])
    assert cause is not None
    assert (cause.name, cause.detail) == ("weights", "numerics")
