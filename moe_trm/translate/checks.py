"""The checks of `moe-trm config show` and of a launch, on a translated configuration."""

from __future__ import annotations

import tempfile
from pathlib import Path

from moe_trm.config import resolve
from moe_trm.config.problems import InvalidConfigError
from moe_trm.doctor.preflight import check_launch, smallest_world
from moe_trm.errors import MoeTrmError
from moe_trm.step.recipe import recipe


def failing(text: str) -> list[str]:
    """What refuses this configuration, one line each; empty when a run could start with it here.

    A configuration that `config show` takes is checked as a launch would be, on the fewest ranks that hold the model.
    Where the checkpoint is not here, the mathematics alone is checked, and the missing checkpoint is told.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "translated.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            config = resolve(file).config
        except InvalidConfigError as error:
            return [f"config show: {problem}" for problem in error.problems]
        except MoeTrmError as error:
            return [f"config show: {error}"]
    found = []
    try:
        recipe(config)
    except MoeTrmError as error:
        found.append(f"launch: {error}")
    if found:
        return found
    try:
        check_launch(config, world_size=smallest_world(config.learner.parallel))
    except MoeTrmError as error:
        found.append(f"launch: {error}")
    return found
