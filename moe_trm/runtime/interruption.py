"""Ctrl-C and SIGTERM: a start that is asked to stop ends at once, a run after its update; a second ends the process.

Before the first step there is nothing to save. Whoever waits then for a server or for other ranks would make the
launcher wait as well, and kill it in the end.

Python runs the handler of a signal between two instructions of the main thread, and none are reached inside of a
collective or a rendezvous that waits in C++. So the number of a signal also goes into a pipe, whose reader is another
thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

ASKED = (signal.SIGINT, signal.SIGTERM)
"""Signals by which a run is asked to stop."""
ECHO_S = 5.0
"""Terminal, service manager and launchers pass on the same request: what comes within this time is not a second one."""
UNWIND_S = 5.0
"""Time for a start that is asked to stop to leave its contexts; then it ends wherever it is."""


class Stopped(SystemExit):
    """This process was asked to stop before its first step."""


class Interruption:
    """Remembers that this process was asked to stop. `install` in the main thread."""

    def __init__(self) -> None:
        self.requested = ""
        """Name of the signal that asked, empty when none did."""
        self._since, self._starting = 0.0, True

    def install(self) -> None:
        """Take SIGINT and SIGTERM from now on. Until `begin_steps`, the first raises `Stopped`."""
        arrived, arrives = os.pipe()
        os.set_blocking(arrives, False)
        signal.set_wakeup_fd(arrives, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # its signals are not ours
        threading.Thread(target=self._watch, args=(arrived,), name="interruption", daemon=True).start()
        for number in ASKED:
            signal.signal(number, self._note)

    def begin_steps(self) -> None:
        """From now on the first signal is only noted: what is being trained is finished and saved."""
        self._starting = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and time.monotonic() - self._since > ECHO_S:
            os._exit(128 + number)
        if not self.requested:
            self.requested, self._since = signal.Signals(number).name, time.monotonic()
            if self._starting:
                raise Stopped(128 + number)

    def _watch(self, arrived: int) -> None:
        """End a start that was asked to stop and is still there; also a process whose main thread hears no second."""
        first_s = 0.0
        while number := int.from_bytes(os.read(arrived, 1)):
            if number not in ASKED:
                continue
            if self._starting:
                time.sleep(UNWIND_S)
                os._exit(128 + number)
            if first_s and time.monotonic() - first_s > ECHO_S:
                time.sleep(ECHO_S)
                os._exit(128 + number)
            first_s = first_s or time.monotonic()
