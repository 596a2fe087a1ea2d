"""Programs that are interrupted while they start."""

from __future__ import annotations

import signal
import subprocess
import sys


def assert_ends_silently(program: str, said: str) -> None:
    """Ctrl-C when `program` has printed the line `said` ends it at once: the status of a shell, and no traceback."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == f"{said}\n"
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=30)
    assert running.returncode == 128 + signal.SIGINT
    assert told == ""
