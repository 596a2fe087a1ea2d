"""Experiment trackers as sinks. Each imports its library when it is made, so that none is needed unless asked for.

Numbers go as they are, under their names in `metrics.jsonl`; a verdict goes as text when it changes. Where runs are
kept, and under which account, is what each library's own environment variables say (`WANDB_MODE`,
`MLFLOW_TRACKING_URI`, `TRACKIO_DIR`, ...).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_trm.config.schema import ObserveConfig
from moe_trm.errors import ConfigError
from moe_trm.observe.advice.verdict_changes import VerdictChanges
from moe_trm.observe.sinks import Sink


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers file it; `settings` are the whole configuration as plain data, without secrets."""

    name: str
    project: str
    settings: dict[str, Any]
    folder: Path


class TensorBoard(Sink):
    """Event files under `RUN_DIR/tensorboard`."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"))
        self._verdict = VerdictChanges()
        self._writer.add_text("config", f"```json\n{json.dumps(run.settings, indent=2)}\n```")

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        verdict = self._verdict.of(metrics)
        if verdict:
            self._writer.add_text("verdict", verdict, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Sink):
    """One run of project `observe.project`; files under `RUN_DIR/wandb`."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=run.project, name=run.name, dir=str(run.folder), config=run.settings, reinit=True
        )
        self._verdict = VerdictChanges()

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        verdict = self._verdict.of(metrics)
        self._run.log({**numbers(metrics), **({"verdict": verdict} if verdict else {})}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(Sink):
    """One run of experiment `observe.project`; the verdict is the tag `verdict`."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.set_experiment(run.project)
        mlflow.start_run(run_name=run.name)
        mlflow.log_dict(run.settings, "config.json")
        self._verdict = VerdictChanges()

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self._mlflow.log_metrics(numbers(metrics), step=step)
        verdict = self._verdict.of(metrics)
        if verdict:
            self._mlflow.set_tag("verdict", verdict)

    def close(self) -> None:
        self._mlflow.end_run()


class Trackio(Sink):
    """One run of project `observe.project`."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio: Any = trackio
        trackio.init(project=run.project, name=run.name, config=run.settings, embed=False)
        self._verdict = VerdictChanges()

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        verdict = self._verdict.of(metrics)
        self._trackio.log({**numbers(metrics), **({"verdict": verdict} if verdict else {})}, step=step)

    def close(self) -> None:
        self._trackio.finish()


TRACKERS: Mapping[str, Callable[[TrackedRun], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def check_trackers(observe: ObserveConfig) -> None:
    """Raise `ConfigError` when a library of `observe.sinks` is not installed. Imports none of them."""
    missing = [name for name in observe.sinks if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "a tracker's library is not installed",
            where="observe.sinks",
            got=", ".join(missing),
            expected="installed libraries, or none: metrics.jsonl and the report need no library",
            fix=f"pip install 'moe-trm[{','.join(missing)}]'",
        )


def open_tracker(name: str, run: TrackedRun) -> Sink:
    """The tracker `name`, started. Raises `ConfigError` with the library's own reason when it does not start."""
    try:
        return TRACKERS[name](run)
    except Exception as error:
        raise ConfigError(
            f"{name} does not start",
            where="observe.sinks",
            got=f"{type(error).__name__}: {error}",
            expected="a tracker that can be reached",
            fix="log in or work offline as its documentation says, or leave it out of observe.sinks",
        ) from error


def numbers(metrics: Mapping[str, float | str]) -> dict[str, float]:
    """The finite numbers among the metrics: trackers have no word for the others."""
    return {name: float(v) for name, v in metrics.items() if not isinstance(v, str) and math.isfinite(v)}
