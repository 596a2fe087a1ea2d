"""Errors say what is known, and nothing else."""

from __future__ import annotations

from moe_trm.errors import MoeTrmError
from routing.errors import RouteError


def test_a_line_that_would_say_none_is_left_out() -> None:
    assert "expected" not in str(MoeTrmError("the file is damaged", got="3 bytes"))
    assert "expected" not in str(RouteError("rows", "the file is damaged", got="3 bytes"))


def test_a_value_that_is_none_is_told_where_another_was_expected() -> None:
    assert "got:      None" in str(MoeTrmError("no reward", expected="a number"))
    assert str(RouteError("rows", "no routes", expected="4 rows")) == "no routes: got None, expected 4 rows"
