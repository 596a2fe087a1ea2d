"""The log-ratios by name, and the parts that they are made of. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PARTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "engine": frozenset({"engine"}),
        "lag": frozenset({"lag"}),
        "merged": frozenset({"engine", "lag"}),
        "update": frozenset({"update"}),
        "staleness": frozenset({"lag", "update"}),
        "total": frozenset({"engine", "lag", "update"}),
    }
)
"""Each ratio by name, and the independent parts it is the product of."""
RATIO_NAMES = tuple(PARTS)
