"""`moe-trm doctor CONFIG --no-probe`: a configuration of a cluster is judged without its GPUs and its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_trm.cli import main
from moe_trm.config import load
from moe_trm.rollout.sglang.backend import ARGUMENT_CHECK
from moe_trm.tools.doctor import rehearsal

pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron-Core's import

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
CLUSTER = [path for path in CONFIGS if load(path).rollout.server.tensor_parallel > 1]


def test_there_are_eight_of_them() -> None:
    assert len(CLUSTER) == 8


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments that the engine is to judge, in place of a process for each."""
    heard: list[list[str]] = []

    def run(command: Sequence[str], **_: Any) -> Any:
        start = [*command].index(ARGUMENT_CHECK) + 1
        heard.append([*command[start:]])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(rehearsal, "subprocess", SimpleNamespace(run=run))
    return heard


def test_too_few_gpus_fail(
    words: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launch.start.places.visible_gpus", lambda: ("0", "1", "2", "3"))
    assert main(["doctor", str(CLUSTER[0]), "--no-probe"]) == 1
    assert "FAIL   GPUs: too few GPUs on this machine" in capsys.readouterr().out
