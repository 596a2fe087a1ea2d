"""Ctrl-C and SIGTERM: the first asks the run to end after its step, a second ends the process at once."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

ASKED = (signal.SIGINT, signal.SIGTERM)
"""Signals by which a run is asked to stop."""
ECHO_S = 1.0
"""A terminal and torchrun both pass on the same Ctrl-C: what comes within this time is not a second one."""


class Interruption:
    """Remembers that this process was asked to stop. `install` in the main thread."""

    def __init__(self) -> None:
        self.requested = ""
        """Name of the signal that asked, empty when none did."""
        self._since = 0.0

    def install(self) -> None:
        """Take SIGINT and SIGTERM from now on."""
        for number in ASKED:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and time.monotonic() - self._since > ECHO_S:
            os._exit(128 + number)
        if not self.requested:
            self.requested, self._since = signal.Signals(number).name, time.monotonic()
