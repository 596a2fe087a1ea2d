"""Settings of earlier versions: refused where somebody sets them, left out of what a run of such a version wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOVED = {
    "rollout.server.wait_s": "a learner waits for its servers for rollout.server.startup_timeout_s",
}
"""By dotted key: what does their work."""


def without_removed(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`data`, sections in sections, without these settings."""
    kept = {key: value for key, value in data.items() if f"{prefix}{key}" not in REMOVED}
    return {
        key: without_removed(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in kept.items()
    }
