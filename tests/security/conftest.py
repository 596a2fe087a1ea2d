"""The attacker: another user of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

STRANGER = 65534
Stranger = Callable[..., str]
# The interpreter may lie where the stranger cannot start it.
BECOME = f"""
import os, sys
os.setgroups([])
os.setgid({STRANGER})
os.setuid({STRANGER})
os.umask(0)
exec(sys.argv.pop(1))
"""


@pytest.fixture
def stranger() -> Stranger:
    """Runs a program of Python as another user, with arguments; returns what it printed, or the name of its error."""
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")

    def attack(program: str, *arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", BECOME, program, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() or done.stderr.strip().rpartition("\n")[2].partition(":")[0]

    return attack


@pytest.fixture
def commons() -> Iterator[Path]:
    """A folder like /dev/shm and /tmp, in which everybody may make files and nobody may touch those of others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)
