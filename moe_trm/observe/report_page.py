"""The report as the last thing a run leaves behind."""

from __future__ import annotations

from pathlib import Path

from moe_trm.errors import RunError
from moe_trm.observe.sinks import Sink


class ReportPage(Sink):
    """Writes `RUN_DIR/report.html` when the run ends or is interrupted; a run without a finished step gets none."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def close(self) -> None:
        from moe_trm.observe.report.commands import (
            write,  # the pages of a report: no rank but one needs them, at its end
        )

        try:
            path = write([self._run_dir])
        except RunError:
            return
        print(f"report: {path}", flush=True)
