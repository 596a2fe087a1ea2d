"""Two ranks with different columns of the same rows replay what one process replays, under shared weights too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.columns_rank import CASES, RANKS
from tests.integration.ranks import fork_ranks
from tests.integration.test_replay_rows import LENGTHS

DUE = sum(LENGTHS) - len(LENGTHS)


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str, bool], list[dict[str, Any]]]:
    """By case, what each rank found."""
    done = fork_ranks(["-m", "tests.integration.columns_rank"], RANKS)
    assert done.ok, done.stderr[-4000:]
    by_case: dict[Any, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        by_case.setdefault(tuple(json.loads(line)["case"]), []).append(json.loads(line))
    return by_case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_with_columns_equal_one_process(found: dict[Any, list[dict[str, Any]]], case: Any) -> None:
    both = found[case]
    assert len(both) == RANKS
    assert sum(one["mine"] for one in both) == DUE
    assert min(one["mine"] for one in both) > 0
    for one in both:
        assert one["logprobs"] < 1e-5
        assert one["gradients"] < 1e-4
        assert one["routers"] < 1e-4
        assert one["ranks"] == one["alone"]
        assert one["ranks"][:2] == [DUE * 2, DUE * 2]
        assert one["ranks"][2] > 0
