"""Figures of what data costs stay in their corridors, and a figure that is missing or NaN is noticed."""

from __future__ import annotations

import math

import pytest

from benchmarks.corridor import figures, limits, outside

SOUND = {"a": {"x": 1.0, "y": 2.0}}
CORRIDOR = {"a": {"x": (0.5, 1.5), "y": (2, 2)}}


def test_every_figure_is_in_its_corridor() -> None:
    assert outside(figures(), limits()) == []


def test_corridors_are_ranges() -> None:
    for section, ranges in limits().items():
        for name, (lowest, highest) in ranges.items():
            assert 0 <= lowest <= highest, f"{section}.{name}"
            assert "second" not in name


def test_what_is_in_its_corridor_passes() -> None:
    assert outside(SOUND, CORRIDOR) == []


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ({"a": {"x": 0.4, "y": 2.0}}, "a.x is 0.4"),
        ({"a": {"x": 1.6, "y": 2.0}}, "a.x is 1.6"),
        ({"a": {"x": math.nan, "y": 2.0}}, "a.x is nan"),
        ({"a": {"x": 1.0, "y": math.inf}}, "a.y is inf"),
        ({"a": {"x": 1.0}}, "a.y is missing"),
        ({}, "a.x is missing"),
        ({"a": {"x": 1.0, "y": 2.0, "z": 1.0}}, "a.z has no corridor"),
        ({**SOUND, "b": {"x": 1.0}}, "b.x has no corridor"),
    ],
)
def test_what_is_not_is_said(found: dict[str, dict[str, float]], complaint: str) -> None:
    assert complaint in outside(found, CORRIDOR)[0]
