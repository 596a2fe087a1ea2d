"""Every shipped configuration is valid and free of settings without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_trm.config import resolve
from moe_trm.step.recipe import recipe

_REPOSITORY = Path(__file__).parents[3]
_CONFIGS = sorted((_REPOSITORY / "configs").rglob("*.yaml"))
_EXAMPLES = sorted((_REPOSITORY / "examples").glob("*/config.yaml"))


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_shipped_configuration(path: Path) -> None:
    resolved = resolve(path)
    assert resolved.warnings == ()
    assert resolved.config.name == path.stem


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_shipped_corrections_and_losses_exist_and_take_these_parameters(path: Path) -> None:
    recipe(resolve(path).config)


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.parent.name)
def test_the_configuration_of_an_example(path: Path) -> None:
    resolved = resolve(path)
    assert resolved.warnings == ()
    assert resolved.config.name == path.parent.name
    recipe(resolved.config)


def test_there_are_configurations() -> None:
    assert {"quickstart", "gsm8k", "jsonl"} <= {path.stem for path in _CONFIGS}


def test_quickstart_takes_at_least_forty_optimizer_steps() -> None:
    config = resolve(next(path for path in _CONFIGS if path.stem == "quickstart")).config
    assert config.train.steps * config.learner.minibatches >= 40
    assert (config.replay.mode, config.sampling_mask.mode) == ("R3", "keep")
    assert config.learner.parallel.expert == 2
