"""Restarts of one rollout server that died or hangs, on the same port with the same key.

A server that lends its memory to the learner is left alone until it has it back (`loan.py`).

A server that is late on a loaded machine is not lost: what counts is that its process does nothing while it is asked.
A restarted server serves the checkpoint's weights without a version number. The controller notices this and gives it
the newest push. It samples nothing from the server before the push is proved (`fleet.py`).
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.parse
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from moe_trm.errors import EngineError, MoeTrmError
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.loan import Loan
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.runtime.activity import Activity, activity_of
from moe_trm.runtime.patience import patient

POLL_S = 0.5
"""Pause between two looks at the process."""
LOOK_S = 5.0
"""Pause between two requests to the server."""
LAST_ASK_S = 1.0
"""Time for the answer to the last question, once a silence is over."""
HEALTH_S = 30.0
"""Longest wait for an engine's own health check; SGLang's gives up after 20 s."""

log = logging.getLogger(__name__)


class Watchdog:
    """A running server and the thread that watches it. A context manager: leaving it ends both.

    The arguments are as for `start_server`; `log_path` gets the output of all its lives. `max_restarts`,
    `silence_timeout_s` and `hang_timeout_s` of `rollout.server` are read too. Raises as `start_server`, the first time
    only.
    """

    def __init__(self, served: Served, log_path: Path, api_key: str) -> None:
        self._log_path, self._api_key = log_path, api_key
        self._server = start_server(served, log_path, api_key)
        port = urllib.parse.urlsplit(self._server.url).port
        server = served.rollout.server.model_copy(update={"port": port})
        self._settings = server
        self._served = replace(served, rollout=served.rollout.model_copy(update={"server": server}))
        self._loan = Loan(self._server.url, api_key)
        self._ending, self._over = threading.Event(), threading.Event()
        self.restarts, self._spoke = 0, True
        self._thread = threading.Thread(target=self._watch, name="rollout-watchdog", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its address, the same in all its lives."""
        return self._server.url

    @property
    def server(self) -> Server:
        """Its present life."""
        return self._server

    def wait(self) -> None:
        """Return never; raise `EngineError` when the server has been given up."""
        while not self._over.wait(POLL_S):
            pass
        raise EngineError(
            f"the rollout server was given up after {self.restarts} restarts",
            where=str(self._log_path),
            got=self._server.last_words(),
            fix="The log tells why it ended. rollout.server.max_restarts is the limit.",
        )

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        self._server.stop(self._server.grace_s)

    def _watch(self) -> None:
        looked = well = time.monotonic()
        while not self._ending.wait(POLL_S):
            trouble = self._death()
            if trouble is None and time.monotonic() - looked <= LOOK_S:
                continue
            if not self._loan.try_take():  # its memory is the learner's: it is asked nothing, and not started again
                looked = well = time.monotonic()
                continue
            try:
                if trouble is None:
                    trouble, healthy = self._look(well)
                    self._server.adopt_mapped()  # before it is killed together with this process
                    looked = time.monotonic()
                    well = looked if healthy else well
            finally:
                self._loan.release()
            if trouble is None:
                continue
            if self.restarts >= self._settings.max_restarts:
                log.error("the rollout server %s; it is not started again (%s)", trouble, self._log_path)
                self._over.set()
                return
            self.restarts += 1
            log.warning("the rollout server %s: starting it again (%d)", trouble, self.restarts)
            self._start_again()
            self._spoke = True
            looked = well = time.monotonic()

    def _death(self) -> str | None:
        status = self._server.poll()
        return None if status is None else f"ended with exit status {status}"

    def _look(self, well: float) -> tuple[str | None, bool]:
        """The fault to act on, if there is one, and whether all is well."""
        started_s, activity_before = time.monotonic(), self._activity()
        if self._answers():
            self._spoke = True
            if self._server.answers(self._server.backend.health_path, patient(HEALTH_S)):
                return None, True
        elif self._ending.is_set():
            return None, False
        elif died := self._death():
            return died, False
        elif not self._worked(activity_before, time.monotonic() - started_s):
            return f"neither answered nor computed for {self._settings.silence_timeout_s:g} s", False
        # A large weight update keeps the engine from generating, and a loaded machine from answering; only a long
        # standstill is a fault.
        stuck_s = time.monotonic() - well
        return (f"generated nothing for {stuck_s:.0f} s" if stuck_s > self._settings.hang_timeout_s else None), False

    def _answers(self) -> bool:
        """True when the server's process answers in time."""
        until = time.monotonic() + self._settings.silence_timeout_s
        while (remaining_s := until - time.monotonic()) > 0 and not self._death():
            if self._server.answers(self._server.backend.alive_path, remaining_s):
                return True
            if self._ending.wait(min(POLL_S, remaining_s)):
                return False
        # Where the whole machine was paused, time has passed in which the server could not answer.
        return self._server.answers(self._server.backend.alive_path, LAST_ASK_S)

    def _worked(self, earlier: Activity | None, seconds: float) -> bool:
        """True when the process that should have answered was busy meanwhile. Said once until it answers."""
        latest = self._activity()
        busy = earlier is not None and latest is not None and latest.busy_since(earlier, seconds)
        if busy and self._spoke:
            log.warning("the rollout server has not answered for %.0f s, but is at work: it gets more time", seconds)
            self._spoke = False
        return busy

    def _activity(self) -> Activity | None:
        """Activity of the server's first process, which answers requests; None where it cannot be known."""
        try:
            return activity_of(self._server.process.pid)
        except OSError:
            return None

    def _start_again(self) -> None:
        self._server.stop(grace_s=0.0)
        try:
            self._server = start_server(self._served, self._log_path, self._api_key, cancelled=self._ending)
        except (MoeTrmError, OSError) as error:  # this thread must go on: nobody else looks after the server
            log.warning("the rollout server did not come back: %s", error)
