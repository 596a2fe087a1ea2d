"""A signal to every process of a job: the controller outlives its ranks, and what is not finished is undone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_trm.config import load
from moe_trm.errors import ControllerLeaving
from moe_trm.observe.phases import Phases
from moe_trm.rollout.client import ControllerProcess, RolloutClient
from moe_trm.step.arrivals import Arrivals
from moe_trm.types import TrainBatch
from tests.unit.rollout.test_third_engine import ABLE, file  # noqa: F401 (a fixture)

STUCK = f"{Path(__file__).with_name('scripted_engine.py')}:StuckEngine"


@dataclass
class Job:
    """A controller and the clients of its two ranks."""

    process: ControllerProcess
    ranks: list[RolloutClient]
    pool: ThreadPoolExecutor
    log: Path
    asked: threading.Event
    """The second rank was asked to stop."""

    def push(self, version: int) -> None:
        """By both ranks."""
        told = [self.pool.submit(rank.push, version, (), directory=str(self.log.parent)) for rank in self.ranks]
        for each in told:
            each.result(120)

    def signal(self, number: signal.Signals) -> None:
        """Twice, to the controller alone; returns once it has heard."""
        for _ in range(2):
            os.kill(self.process._process.pid, number)
        deadline = time.monotonic() + 120
        while "what is not finished is refused" not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)


@pytest.fixture
def job(request: pytest.FixtureRequest, file: Path, tmp_path: Path) -> Iterator[Job]:  # noqa: F811
    """Its parameter: its steps are streamed."""
    streams = getattr(request, "param", False)
    config, log = load(file, [*ABLE, f"rollout.engine={STUCK}", "pipeline.mode=sync"]), tmp_path / "controller.log"
    process = ControllerProcess(config, None, log)
    access, asked = process.access("1", None), threading.Event()
    ranks = [
        RolloutClient(access.endpoint, access.key, ranks=(0, 2), data=(0, 2), process=process),
        RolloutClient(access.endpoint, access.key, ranks=(1, 2), data=(1, 2), asked=asked.is_set, streams=streams),
    ]
    with ThreadPoolExecutor(2) as pool:
        yield Job(process, ranks, pool, log, asked)
        process.wait(0.0)
    for rank in ranks:
        rank._connection.close()
        rank._socket.close()
    assert process._process.poll() == 128 + signal.SIGTERM, "its own rank has ended it"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_controller_outlives_the_ranks_that_it_serves(job: Job, number: signal.Signals) -> None:
    """What one rank was given the other gets too; what is not finished both are refused; states are still told."""
    first, second = job.ranks
    job.push(0)
    first.next_batch(1, ())
    job.signal(number)
    assert isinstance(second.next_batch(1, ()), TrainBatch)
    for rank in job.ranks:
        with pytest.raises(ControllerLeaving):
            rank.push(1, (), directory=str(job.log.parent))
        with pytest.raises(ControllerLeaving):
            rank.next_batch(2, ())
        assert rank.evaluate(1) == {}
    assert first.state()["ledger"]


def test_ranks_that_wait_for_samples_are_told_at_once(job: Job) -> None:
    job.push(0)
    for rank in job.ranks:
        rank.next_batch(1, ())
    job.push(1)
    waiting = [job.pool.submit(rank.next_batch, 2, ()) for rank in job.ranks]
    job.signal(signal.SIGTERM)
    for each in waiting:
        with pytest.raises(ControllerLeaving):
            each.result(120)
    assert job.ranks[0].state()["ledger"]


def test_a_rank_that_is_asked_to_stop_waits_for_no_samples_and_no_rank_does(job: Job) -> None:
    job.push(0)
    for rank in job.ranks:
        rank.next_batch(1, ())
    job.push(1)
    waiting = [job.pool.submit(rank.next_batch, 2, ()) for rank in job.ranks]
    job.asked.set()
    for each in waiting:
        with pytest.raises(ControllerLeaving):
            each.result(120)
    assert "rank 1 was asked to end" in job.log.read_text()
    assert job.ranks[0].state()["ledger"]


@pytest.mark.parametrize("job", [True], indirect=True)
def test_a_streamed_step_still_gets_its_samples(job: Job) -> None:
    """Parts of it may be trained already, and would be lost."""
    job.push(0)
    job.asked.set()
    job.ranks[0].next_batch(1, ())
    job.push(1)
    waiting = job.pool.submit(job.ranks[1].next_batch, 2, ())
    time.sleep(1.5)  # it would have asked by now
    job.signal(signal.SIGTERM)
    with pytest.raises(ControllerLeaving):
        waiting.result(120)
    assert "rank 1 was asked" not in job.log.read_text()


class Leaving:
    """A source that is asked to end before `part` of a step."""

    def __init__(self, part: int) -> None:
        self._part = part

    def next_batch(self, step: int, layer_ids: tuple[int, ...], part: int = 0) -> TrainBatch:
        if part >= self._part:
            raise ControllerLeaving("this run was asked to end")
        return TrainBatch(step, (), {})


def test_a_step_of_which_nothing_was_given_is_undone() -> None:
    arrivals = Arrivals(2, Leaving(0), Phases(()))
    assert list(arrivals.of(1, (), whole=False)) == []
    assert arrivals.undone
    arrivals = Arrivals(2, Leaving(1), Phases(()))
    assert list(arrivals.of(1, (), whole=True)) == [], "no part was trained, for all were to be given together"
    assert arrivals.undone


def test_a_step_that_has_begun_to_train_is_not() -> None:
    arrivals = Arrivals(2, Leaving(1), Phases(()))
    parts = arrivals.of(1, (), whole=False)
    next(parts)
    with pytest.raises(ControllerLeaving):
        next(parts)
    assert not arrivals.undone
