"""Differences between the settings of a resumed run and those of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_FREE = (
    "name",
    "run_dir",
    "train.",
    "checkpoint.",
    "record.",
    "sync.",
    "rollout.url",
    "rollout.api_key",
    "rollout.server.",
    "rollout.intake_processes",
)
"""Settings of a run's location and length; none of them changes the computation of a step."""


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: then -> now` of every setting that differs, apart from those that do not change what a step computes."""
    before, after = dict(_flat(saved)), dict(_flat(now))
    keys = [key for key in dict.fromkeys([*before, *after]) if not key.startswith(_FREE)]
    return [
        f"{key}: {before.get(key, '(absent)')} -> {after.get(key, '(absent)')}"
        for key in keys
        if before.get(key, _FREE) != after.get(key, _FREE)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
