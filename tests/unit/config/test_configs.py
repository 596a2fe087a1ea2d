"""Every shipped configuration is valid and free of settings without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_trm.config import resolve
from moe_trm.step.recipe import recipe

_REPOSITORY = Path(__file__).parents[3]
_CONFIGS = sorted((_REPOSITORY / "configs").rglob("*.yaml"))
_EXAMPLES = sorted((_REPOSITORY / "examples").glob("*/config.yaml"))
_NAMED = {**{path.stem: path for path in _CONFIGS}, **{path.parent.name: path for path in _EXAMPLES}}


@pytest.mark.parametrize("name", _NAMED)
def test_shipped_configuration(name: str) -> None:
    """Its corrections and its loss exist and take these parameters, too."""
    resolved = resolve(_NAMED[name])
    assert resolved.warnings == ()
    assert resolved.config.name == name
    recipe(resolved.config)


def test_there_are_configurations() -> None:
    assert len(_NAMED) == len(_CONFIGS) + len(_EXAMPLES)
    assert {"quickstart", "gsm8k", "jsonl"} <= {path.stem for path in _CONFIGS}


def test_quickstart_takes_at_least_forty_optimizer_steps() -> None:
    config = resolve(next(path for path in _CONFIGS if path.stem == "quickstart")).config
    assert config.train.steps * config.learner.minibatches >= 40
    assert (config.replay.mode, config.sampling_mask.mode) == ("R3", "keep")
    assert config.learner.parallel.expert == 2
