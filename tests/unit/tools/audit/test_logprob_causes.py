"""Causes of log-probs on made-up rows: single tokens, single rows, and log-probs at other tokens."""

from __future__ import annotations

import numpy as np
import pytest

from moe_trm.tools.audit.dump import Array, AuditRow
from moe_trm.tools.audit.logprob_causes import verdict
from moe_trm.tools.audit.misplaced import misplaced
from moe_trm.tools.audit.reference import PolicyScores, RowScores

ROWS, SAMPLED, LAYERS, EXPERTS = 12, 40, 2, 8


def scores(changes: dict[int, Array]) -> list[RowScores]:
    """Rows whose log-probs differ from the model's by rounding, and by `changes` in the rows of these numbers."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(ROWS):
        model, entropy = -rng.exponential(2, SAMPLED), rng.uniform(1, 3, SAMPLED)
        rollout = model + rng.normal(0, 0.01, SAMPLED) + changes.get(number, np.zeros(SAMPLED))
        routes = rng.random((SAMPLED + 1, LAYERS, EXPERTS)).argsort(-1)[..., :2]
        row = AuditRow(
            f"row {number}", np.arange(SAMPLED + 2), np.arange(SAMPLED + 2) > 1, rollout=rollout, routes=routes
        )
        scored = PolicyScores(model, entropy)
        rows.append(RowScores(row, routes, routes, scored, scored))
    return rows


def found(changes: dict[int, Array]) -> tuple[str, int]:
    """The cause of the rows that are alike, and how many are off by themselves."""
    judged = verdict(scores(changes), "rollout", set(), set(), EXPERTS)
    assert judged is not None
    return judged.finding.cause, len(judged.outliers)


def test_single_tokens_that_are_off_by_nats_are_no_other_weights() -> None:
    token = np.where(np.arange(SAMPLED) == 30, 2.5, 0.0)
    assert found({}) == ("precision", 0)
    assert found(dict.fromkeys(range(4), token)) == ("precision", 0)


def test_other_weights_move_most_tokens() -> None:
    noise = np.random.default_rng(1).normal(0, 0.2, (ROWS, SAMPLED))
    assert found(dict(enumerate(noise))) == ("weights", 0)
    assert found({3: 4 * noise[3]}) == ("precision", 1)


VALUES = list(-np.random.default_rng(2).exponential(2, (6, SAMPLED)))


@pytest.mark.parametrize("offset", [-2, -1, 1, 2])
def test_log_probs_of_other_tokens_are_told_with_their_distance(offset: int) -> None:
    result = misplaced([np.roll(row, -offset) for row in VALUES], VALUES)
    assert result is not None
    assert (result.cause, result.rows) == ("shifted log-probs", tuple(range(6)))
    assert f"{offset:+d} further on, in 6 of 6 rows" in result.sentence


def test_log_probs_of_another_row_are_told_where_most_rows_have_them() -> None:
    swapped = [VALUES[number ^ 1] for number in range(6)]
    result = misplaced(swapped, VALUES)
    assert result is not None
    assert (result.cause, result.rows) == ("log-probs of another row", tuple(range(6)))
    assert misplaced([*swapped[:2], *VALUES[2:]], VALUES) is None
    assert misplaced([row + 0.5 for row in VALUES], VALUES) is None
