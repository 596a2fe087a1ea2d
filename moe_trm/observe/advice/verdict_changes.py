"""Filter of repeated verdicts: a verdict is news when it is the first, or when its case or advice changed."""

from __future__ import annotations

from collections.abc import Mapping


class VerdictChanges:
    """Remembers the last verdict told."""

    def __init__(self) -> None:
        self._last: tuple[object, object] | None = None

    def of(self, metrics: Mapping[str, object]) -> str:
        """The sentence to print now, with its advice; empty when there is no verdict or it equals the last one."""
        setting = metrics.get("verdict/config", "")
        this = (metrics.get("verdict/case"), setting)
        if "verdict" not in metrics or this == self._last:
            return ""
        self._last = this
        return f"{metrics['verdict']}" + (f" Try {setting}." if setting else "")
