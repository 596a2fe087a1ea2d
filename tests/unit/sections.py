"""Sections of a configuration as positional arguments."""

from __future__ import annotations

from typing import Any

from moe_trm.config.schema import Config


def sections_of(config: Config, *names: str) -> list[Any]:
    """Those called `names`, to be unpacked into a function that takes them."""
    return [getattr(config, name) for name in names]
