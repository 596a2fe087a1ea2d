"""Programs that are interrupted while they start."""

from __future__ import annotations

import signal
import subprocess
import sys


def assert_ends_with_one_line(program: str, said: str, line: str) -> None:
    """Ctrl-C when `program` has printed the line `said` ends it at once: a shell's status, and `line` on stderr."""
    # A shell's background job ignores Ctrl-C, and so do its children.
    heeding = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{program}"
    with subprocess.Popen(
        [sys.executable, "-c", heeding], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == f"{said}\n"
        running.send_signal(signal.SIGINT)
        rest, told = running.communicate(timeout=30)
    assert running.returncode == 128 + signal.SIGINT
    assert "went on" not in rest
    assert told == f"{line}\n"
