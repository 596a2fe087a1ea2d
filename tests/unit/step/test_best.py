from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_trm.config.schema import Config
from moe_trm.step.best import Best
from tests.unit.doubles import StandInLearner


class Exporter(StandInLearner):
    """Writes a number as its weights."""

    weights = 0

    def export_checkpoint(self, directory: str) -> None:
        Path(directory).mkdir(parents=True)
        (Path(directory) / "weights").write_text(str(self.weights))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def config(**settings: object) -> Config:
    return Config.model_validate({"model": {"checkpoint": "none"}, "eval": settings})


def offer_all(best: Best, learner: Exporter, values: list[float | None]) -> None:
    for step, value in enumerate(values):
        learner.weights = step
        best.offer(step, {} if value is None else {"eval/accuracy": value}, learner)


def best_of(settings: Config, folder: Path) -> Best:
    return Best(settings.eval, settings.task, settings.rollout, folder)


@pytest.mark.usefixtures("one_rank")
def test_only_what_beats_the_start_and_all_before_is_kept(tmp_path: Path) -> None:
    learner, best = Exporter(), best_of(config(), tmp_path)
    offer_all(best, learner, [0.5, 0.4, None, 0.5])
    assert not (tmp_path / "best").exists()
    offer_all(best, learner, [0.5, 0.6, 0.8, 0.7, 0.8])
    assert (tmp_path / "best" / "weights").read_text() == "2"
    resumed = best_of(config(), tmp_path)
    resumed.restore(best.state())
    offer_all(resumed, learner, [0.0, 0.7])
    assert (tmp_path / "best" / "weights").read_text() == "2"
    offer_all(resumed, learner, [0.0, 0.9])
    assert (tmp_path / "best" / "weights").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["best"]


@pytest.mark.usefixtures("one_rank")
def test_a_best_checkpoint_that_is_not_wanted_or_not_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learner = Exporter()
    offer_all(best_of(config(keep_best=False), tmp_path), learner, [0.1, 0.9])
    offer_all(best_of(config(best_metric="eval/other/accuracy"), tmp_path), learner, [0.1, 0.9])
    assert not (tmp_path / "best").exists()
    assert "eval.best_metric=eval/other/accuracy" in caplog.text


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("first", [float("nan"), float("inf"), -float("inf")])
def test_an_evaluation_that_is_not_a_number_neither_is_the_best_nor_bars_it(tmp_path: Path, first: float) -> None:
    learner, best = Exporter(), best_of(config(), tmp_path)
    offer_all(best, learner, [first, first])
    assert best.state() is None
    assert not (tmp_path / "best").exists()
    offer_all(best, learner, [None, 0.3])
    assert best.state() == 0.3
    best.restore(first)
    assert best.state() is None
