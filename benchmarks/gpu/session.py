"""A session: stages one after the other within a budget, each leaving its result at once."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.stages import CONFIG, Stage
from moe_trm.rollout.credentials import API_KEY_VARIABLE

BEGINS_WITH = 0.6
"""Share of a stage's limit with which it starts."""
END_S = 60.0
"""Time for a process to end after a signal."""
KEPT = ("time/", "probe/", "engine/", "routing/", "weights/", "replay/applied_fraction", "rollout/tokens_per_s")
"""Beginnings of the names of metrics whose medians are kept."""


@dataclass
class Session:
    """Results in `folder`, from which a later session goes on. Leaving it ends the server.

    `fused`: Transformer Engine is installed.
    """

    folder: Path
    budget_s: float
    fused: bool
    _start_s: float = field(default_factory=time.monotonic)
    _server: tuple[tuple[str, ...], subprocess.Popen[bytes]] | None = None
    _key: str = field(default_factory=lambda: secrets.token_hex(16))

    def __enter__(self) -> Session:
        for name in ("logs", "figures", "results"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_server()

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self._start_s)

    def results(self) -> dict[str, dict[str, Any]]:
        """The results of the finished stages, in the order of their ends."""
        files = sorted((self.folder / "results").glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        return {file.stem: json.loads(file.read_text()) for file in files}

    def run(self, stages: Iterable[Stage]) -> None:
        """Every stage that is not done and fits into what is left."""
        for stage in stages:
            result = self.folder / "results" / f"{stage.name}.json"
            if result.exists():
                continue
            if stage.fused and not self.fused:
                print(f"{stage.name}: Transformer Engine is not installed", flush=True)
                continue
            if self.left_s < BEGINS_WITH * stage.limit_s:
                print(f"{stage.name}: {self.left_s:.0f} s are left and it may take {stage.limit_s:.0f}", flush=True)
                continue
            start_s = time.monotonic()
            if stage.server is not None:
                self._serve(stage.server)
            status = self._wait(stage.name, [sys.executable, *stage.words], min(stage.limit_s, self.left_s))
            row = {"answers": stage.answers, "status": status, "seconds": time.monotonic() - start_s}
            result.write_text(json.dumps({**row, "figures": figures(self.folder, stage.name)}, indent=1))
            print(f"{stage.name}: {'done' if not status else f'failed ({status})'}, {row['seconds']:.0f} s", flush=True)
            if status:
                print((self.folder / "logs" / f"{stage.name}.log").read_text(errors="replace")[-2000:], flush=True)

    def _serve(self, settings: tuple[str, ...]) -> None:
        """Let a server with these settings run; the learner waits until it has loaded."""
        if self._server is not None and (self._server[0] != settings or self._server[1].poll() is not None):
            self._end_server()
        if self._server is None:
            words = [sys.executable, "-m", "launch.rollout", str(CONFIG), "name=server", *settings]
            self._server = settings, self._start("server", words)

    def _end_server(self) -> None:
        if self._server is not None:
            _end(self._server[1])
            self._server = None

    def _start(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        variables = {API_KEY_VARIABLE: self._key, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                words, stdout=log, stderr=log, env={**os.environ, **variables}, start_new_session=True
            )

    def _wait(self, name: str, words: Sequence[str], limit_s: float) -> int:
        """The exit status; 124: it took longer than `limit_s`."""
        process = self._start(name, words)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, in time to clean up where it can."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def figures(folder: Path, name: str) -> Mapping[str, Any]:
    """The measurements of a stage: the file that it wrote, or the medians of its run."""
    file, metrics = folder / "figures" / f"{name}.json", folder / "runs" / name / "metrics.jsonl"
    if file.exists():
        content: dict[str, Any] = json.loads(file.read_text())
        if "rows" in content and isinstance(content["rows"], list):  # of `benchmarks.table.report`
            return {
                f"{row['what']}: {key}": value for row in content["rows"] for key, value in row.items() if key != "what"
            }
        return content
    return run_figures([json.loads(line) for line in metrics.read_text().splitlines()]) if metrics.exists() else {}


def run_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """First and last reward and accuracy, and medians over the steps."""
    summary: dict[str, Any] = {"steps": len(rows) - 1}
    for key in sorted({key for row in rows for key in row}):
        values = [row[key] for row in rows if isinstance(row.get(key), int | float)]
        if not values:
            continue
        if key.startswith("reward/mean") or "accuracy" in key:
            summary[f"{key}, first"], summary[f"{key}, last"] = values[0], values[-1]
        elif key.startswith(KEPT):
            summary[key] = median(values)
    return summary
