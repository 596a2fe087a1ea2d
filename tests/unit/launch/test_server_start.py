"""A server that starts beside the learner: who ends whom, and whose error is told."""

from __future__ import annotations

import signal
import sys
import threading
from types import TracebackType

import pytest

from launch import job
from launch.server_start import ServerStart
from moe_trm.errors import EngineError
from tests.unit.launch.interrupted import assert_ends_silently


class Server:
    """It is ready at once; `ended` is set when it is left."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.ended.set()


def sleeping(monkeypatch: pytest.MonkeyPatch, seconds: float, code: int = 0) -> None:
    """The learner is a process that only waits."""
    program = f"import sys, time; time.sleep({seconds}); sys.exit({code})"
    monkeypatch.setattr(job, "learner_command", lambda *_: [sys.executable, "-c", program])


def never(given_up: threading.Event) -> Server:
    assert given_up.wait(60)
    raise EngineError("the rollout server was not needed any more")


def test_the_learner_ends_and_the_server_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping(monkeypatch, 0.3, code=4)
    server = Server()
    with ServerStart(lambda _: server) as start:
        assert job.run_learner("c", [], 1, None, start) == 4
        assert start.over.is_set()
        assert not start.failed
    assert server.ended.is_set()


def test_a_server_that_fails_ends_the_learner_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping(monkeypatch, 600)

    def start(_given_up: threading.Event) -> Server:
        raise EngineError("the rollout server died while starting")

    with pytest.raises(EngineError, match="died while starting"), ServerStart(start) as server:
        assert job.run_learner("c", [], 1, None, server) == -signal.SIGKILL


def test_a_learner_that_refuses_ends_the_start_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping(monkeypatch, 0, code=2)
    with ServerStart(never) as start:
        assert job.run_learner("c", [], 1, None, start) == 2
        assert not start.over.is_set()


PROGRAM = """
import sys, threading
from launch import job
from launch.server_start import ServerStart
job.learner_command = lambda *_: [sys.executable, "-c", "import time; print('waiting', flush=True); time.sleep(600)"]
with ServerStart(lambda given_up: given_up.wait(60) and 1 / 0) as start:
    job.run_learner("c", [], 1, None, start)
"""


def test_ctrl_c_while_the_server_starts_ends_all_at_once() -> None:
    assert_ends_silently(PROGRAM, "waiting")
