"""Whatever ends a run, every rank and the controller are gone within ten seconds, and none by a SIGKILL."""

from __future__ import annotations

import itertools

import pytest

from moe_trm.runtime.patience import patient
from tests.drills.stop_times import BACKENDS, LIMIT_S, MODES, MOMENTS, SIGNALS, Cell, cells, paired, stopped

SHORT: Cell = ("megatron", "sync", "sampling", "SIGTERM to all")


def test_few_cells_show_each_pair() -> None:
    table, cover = cells(), paired(cells())
    without = {signal for signal in SIGNALS if "the controller" not in signal}
    assert len(table) == len(BACKENDS) * len(MODES) * (len(SIGNALS) * len(MOMENTS) - 3)
    assert len(cover) <= 33
    for left, right in itertools.combinations(range(4), 2):
        assert {(cell[left], cell[right]) for cell in cover} == {(cell[left], cell[right]) for cell in table}
    assert {cell[3] for cell in table if cell[2] == "peer"} == without, "nobody has a controller yet"


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id="-".join(cell), marks=() if cell == SHORT else pytest.mark.slow)
     for cell in dict.fromkeys([SHORT, *paired(cells())])],
)  # fmt: skip
def test_every_process_ends_in_time(cell: Cell) -> None:
    row = stopped(*cell)
    # The table of `tests.drills.stop_times` has the limit itself: it is for a machine without neighbours.
    assert not row["killed"], row["exit"]
    assert row["saved"] != "no", row["exit"]
    assert float(row["seconds"]) <= patient(LIMIT_S), "every process is gone"
