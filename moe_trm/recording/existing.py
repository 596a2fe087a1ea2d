"""A recording that is already there: a run adds to its own, and never to another run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_trm.errors import ConfigError
from moe_trm.recording.bundle import BundleReader
from moe_trm.recording.scores import CONFIG_FILE, ScoresReader


def check_not_anothers(folder: Path, owner: tuple[str, str], *, goes_on: bool) -> None:
    """Raise `ConfigError` when recording into `folder` would replace or mix with what another run recorded there.

    `owner`: `run_dir` and `name` of this run. `goes_on`: it goes on from a checkpoint of its own, and so with its own
    recording.
    """
    steps = sorted({*BundleReader(str(folder)).steps(), *ScoresReader(folder).steps()})
    if not steps or (goes_on and _owner(folder) in (None, owner)):
        return
    raise ConfigError(
        "there is a recording in this folder already, and a new run would replace it",
        where="config key record.bundle",
        got=f"{folder} with steps {steps[0]} to {steps[-1]}",
        expected="a folder without a recording",
        fix="Choose another folder, or move the recording away. A run that goes on from its own checkpoint adds to it.",
    )


def _owner(folder: Path) -> tuple[str, str] | None:
    """`run_dir` and `name` of the run that recorded here, as far as that is known."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        return str(config["run_dir"]), str(config["name"])
    except (OSError, ValueError, KeyError):
        return None
