"""Formats of fake-quantised weights, by name. Imports no torch."""

from __future__ import annotations

from typing import Literal

WeightFormat = Literal["fp8_e4m3", "int8", "int4"]

LARGEST: dict[WeightFormat, float] = {"fp8_e4m3": 448.0, "int8": 127.0, "int4": 7.0}
"""The largest number of each format, which the largest weight of a channel or block becomes."""
