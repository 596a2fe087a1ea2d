"""Origin of the routes of made-up rows whose tokens choose alike, as those of one template do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_trm.tools.audit.dump import AuditRow
from moe_trm.tools.audit.reference import RowScores
from moe_trm.tools.audit.route_causes import route_faults

ROWS, TOKENS, LAYERS, EXPERTS = 12, 47, 4, 16
ALIKE = 0.6
"""Share of token-layers in which all rows choose the same experts: single tokens of another row hardly disagree."""


def rows_alike(seed: int) -> list[RowScores]:
    """Rows with the routes of their own tokens."""
    rng = np.random.default_rng(seed)
    common, *own = rng.random((ROWS + 1, TOKENS, LAYERS, EXPERTS)).argsort(-1)[..., :2]
    rows = []
    for number, routes in enumerate(own):
        live = np.where(rng.random((TOKENS, LAYERS, 1)) < ALIKE, common, routes)
        row = AuditRow(f"row {number}", np.arange(TOKENS + 1), np.arange(TOKENS + 1) > 7, routes=live)
        rows.append(RowScores(row, live, live, None, None))
    return rows


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("half", [slice(26, None), slice(0, 20)], ids=["late", "early"])
def test_routes_of_another_row_in_a_half_are_named_where_rows_choose_alike(seed: int, half: slice) -> None:
    rows = rows_alike(seed)
    assert route_faults(rows, EXPERTS) == []
    mixed = rows[1].live.copy()
    mixed[half] = rows[7].live[half]
    rows[1] = replace(rows[1], recorded=mixed)
    [fault] = route_faults(rows, EXPERTS)
    assert (fault.row, fault.cause, fault.figures["row"]) == (1, "request", "row 7")
