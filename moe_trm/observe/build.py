"""From configuration to the sinks of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moe_trm.config.schema import Config
from moe_trm.observe.lines import ProgressLines
from moe_trm.observe.sinks import Guarded, JsonLines, Sink, keep_steps
from moe_trm.observe.trackers import open_tracker


@contextmanager
def open_sinks(config: Config, run_dir: Path, *, first_step: int) -> Iterator[list[Sink]]:
    """`metrics.jsonl`, what the terminal shows, and the trackers asked for; closed however the run ends.

    A run that goes on after `first_step` keeps the lines up to it; one that begins anew (0) begins the file anew.
    Raises `ConfigError` when a tracker does not start.
    """
    path = run_dir / "metrics.jsonl"
    keep_steps(path, first_step)
    trackers = [Guarded(open_tracker(name, config, run_dir), name) for name in config.observe.sinks]
    sinks = [JsonLines(path), ProgressLines(config.train.steps), *trackers]
    with ExitStack() as stack:
        for sink in reversed(sinks):
            stack.callback(sink.close)
        yield sinks
