"""From configuration to the sinks of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moe_trm.config.schema import Config, ObserveConfig, TrainConfig
from moe_trm.observe.lines import ProgressLines
from moe_trm.observe.panel import LivePanel
from moe_trm.observe.prometheus import open_prometheus
from moe_trm.observe.report_page import ReportPage
from moe_trm.observe.run_outcome import RunOutcome
from moe_trm.observe.server_log import ServerLog
from moe_trm.observe.sinks import Guarded, JsonLines, Sink, keep_steps
from moe_trm.observe.trackers import TrackedRun, open_tracker
from moe_trm.observe.transcripts import open_transcripts
from moe_trm.runtime.interruption import Stopped


@contextmanager
def open_sinks(config: Config, run_dir: Path, *, first_step: int) -> Iterator[list[Sink]]:
    """Open `metrics.jsonl`, the terminal output, the trackers, transcripts and the report.

    They are told of an error that ends the run (`Stopped` is none), and closed in this order however it ends. A run
    that continues after `first_step` keeps the lines up to it. Raises `ConfigError` when a tracker does not start.
    """
    path = run_dir / "metrics.jsonl"
    keep_steps(path, first_step)
    optional_sinks: dict[str, Sink] = {
        "terminal": _terminal(config.name, config.observe, config.train),
        "servers": ServerLog(run_dir),
        "state": RunOutcome(run_dir, first_step=first_step, last_step=config.train.steps),
    }
    tracked = TrackedRun(config.name, config.observe.project, config.dump(), run_dir)
    optional_sinks |= {name: open_tracker(name, tracked) for name in config.observe.sinks}
    if config.observe.prometheus_port:
        optional_sinks["prometheus"] = open_prometheus(config.observe.prometheus_port)
    if config.observe.transcripts:
        optional_sinks["transcripts"] = open_transcripts(config.observe, config.model, run_dir, first_step)
    if config.observe.report:
        optional_sinks["report"] = ReportPage(run_dir)
    sinks = [JsonLines(path), *(Guarded(sink, name) for name, sink in optional_sinks.items())]
    with ExitStack() as stack:
        for sink in reversed(sinks):
            stack.callback(sink.close)
        try:
            yield sinks
        except Stopped:
            raise
        except BaseException as error:
            for sink in sinks:
                sink.failed(error)
            raise


def _terminal(name: str, observe: ObserveConfig, train: TrainConfig) -> Sink:
    live = observe.panel == "on" or (observe.panel == "auto" and sys.stdout.isatty())
    return LivePanel(name, train.steps) if live else ProgressLines(train.steps)
