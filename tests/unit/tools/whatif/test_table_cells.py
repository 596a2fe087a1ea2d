"""Cells of the table of `moe-trm whatif`."""

from __future__ import annotations

import pytest

from moe_trm.tools.whatif.commands import CELL, _cell


@pytest.mark.parametrize("value", [-1327507503.317, 1327507503.317, -9.99999, -1234.56, 0.0, -12345.0, 1e300, -1e300])
def test_a_cell_never_touches_its_neighbour(value: float) -> None:
    assert len(_cell(value)) < CELL
    assert float(_cell(value)) == pytest.approx(value, rel=0.6)
