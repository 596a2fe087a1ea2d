"""The checks of `moe-trm config show` and of a launch, on a translated configuration."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from launch.start.preflight import check_launch, smallest_world
from moe_trm.config import Resolved, resolve
from moe_trm.config.load import UNSET, read_yaml
from moe_trm.config.problems import InvalidConfigError
from moe_trm.errors import MoeTrmError
from moe_trm.step.recipe import recipe


def failing(text: str) -> list[str]:
    """The refusals of this configuration, one line each; empty when a run could start with it here.

    It is checked as a launch would be, on the fewest ranks that hold the model. Values that are open are refused, and
    left out of the checks of the launch.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "translated.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            return _launch(resolve(file))
        except InvalidConfigError as error:
            failures = [f"config show: {problem}" for problem in error.problems]
        except MoeTrmError as error:
            return [f"config show: {error}"]
        file.write_text(yaml.safe_dump(_decided(read_yaml(file))), encoding="utf-8")
        try:
            return failures + _launch(resolve(file))
        except MoeTrmError:
            return failures


def _launch(resolved: Resolved) -> list[str]:
    config = resolved.config
    for check in (
        lambda: recipe(config),
        lambda: check_launch(config, world_size=smallest_world(config.learner.parallel)),
    ):
        try:
            check()
        except MoeTrmError as error:
            return [f"launch: {error}"]
    return []


def _decided(section: dict[str, Any]) -> dict[str, Any]:
    """The settings that are not open."""
    inner = {key: _decided(value) if isinstance(value, dict) else value for key, value in section.items()}
    return {key: value for key, value in inner.items() if value != UNSET}
