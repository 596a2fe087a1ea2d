"""When a verdict is news: the first one, and every one that advises something else than the last."""

from __future__ import annotations

from collections.abc import Mapping


class VerdictChanges:
    """The verdict with its advice, when it is another one than before."""

    def __init__(self) -> None:
        self._setting: str | None = None

    def of(self, metrics: Mapping[str, float | str]) -> str:
        """The sentence to say now; empty when there is no verdict or it advises what the last one did."""
        setting = str(metrics.get("verdict/config", ""))
        if "verdict" not in metrics or setting == self._setting:
            return ""
        self._setting = setting
        return f"{metrics['verdict']}" + (f" Try {setting}." if setting else "")
