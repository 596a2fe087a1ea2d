"""A run's folder as export and evaluation see it: its configuration, and the weights that lie in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_trm.errors import RunError
from moe_trm.learner.checkpoint.folder import CheckpointFolder

FINAL, BEST = "final", "best"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and its resolved configuration as plain data."""

    path: Path
    config: Mapping[str, Any]

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints; Hugging Face folders lie there too."""
        named = self.config.get("checkpoint", {}).get("dir")
        return Path(named) if named else self.path / "checkpoints"

    def steps(self) -> list[int]:
        """Steps of its checkpoints for training, newest first."""
        return CheckpointFolder(self.checkpoints).steps()

    def checkpoint(self, step: int | None) -> Path:
        """The checkpoint for training of `step`; None: the newest. Raises `RunError` where there is none."""
        steps = self.steps()
        if not steps:
            raise RunError(
                "this run has no checkpoint of its training",
                where=str(self.checkpoints),
                got=", ".join(sorted(child.name for child in self.checkpoints.glob("*"))) or "nothing",
                expected="step-NNNNNN folders, which checkpoint.every writes",
                fix=f"{self.final} has the last weights already." if self.final.is_dir() else "",
            )
        if step is not None and step not in steps:
            raise RunError(
                "this run has no checkpoint of that step",
                where=str(self.checkpoints),
                got=f"--step {step}",
                expected=f"one of {', '.join(map(str, sorted(steps)))}",
                fix="checkpoint.keep says how many a run keeps, checkpoint.export_every writes some that stay.",
            )
        return CheckpointFolder(self.checkpoints).path(steps[0] if step is None else step)

    @property
    def final(self) -> Path:
        """The folder of the weights of a finished run (`train.export`)."""
        # `train.export` knows nothing of `checkpoint.dir`.
        return self.path / "checkpoints" / FINAL


def open_run(path: Path) -> RunFolder:
    """The run in `path`. Raises `RunError` when there is none."""
    config = plain_config(path)
    if config is None or not is_run(config):
        raise RunError(
            "this folder holds no run",
            where=str(path),
            got="no such folder" if not path.is_dir() else "no config.json of a run",
            expected="the folder of one run, usually runs/NAME",
            fix="It is a Hugging Face folder already, and needs no export." if config and is_model(config) else "",
        )
    return RunFolder(path, config)


def run_around(folder: Path) -> RunFolder | None:
    """The run in whose `checkpoints` this folder lies; None where it lies elsewhere."""
    parent = folder.resolve().parent.parent
    config = plain_config(parent)
    return RunFolder(parent, config) if config is not None and is_run(config) else None


def plain_config(folder: Path) -> Mapping[str, Any] | None:
    """config.json of a folder; None where there is none that can be read."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def is_run(config: Mapping[str, Any]) -> bool:
    """True for the configuration of a run."""
    return isinstance(config.get("model"), Mapping) and isinstance(config.get("task"), Mapping)


def is_model(config: Mapping[str, Any]) -> bool:
    """True for config.json of a Hugging Face folder."""
    return "model_type" in config or "architectures" in config
