"""A process ends as Python ends one, but for its modules, which are not freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys
from moe_trm.runtime.ending import run_to_end

class Slow:
    def __del__(self):
        print("freed")

slow = Slow()
atexit.register(print, "exit function")

def main():
    print("main")
    {ends}

run_to_end(main)
"""


@pytest.mark.parametrize(
    ("ends", "status", "errors"),
    [
        ("return 3", 3, ""),
        ("sys.exit(4)", 4, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('why')", 1, "why"),
        ("raise KeyError('key')", 1, "KeyError: 'key'"),
    ],
)
def test_a_process_ends_with_its_status_and_frees_no_module(ends: str, status: int, errors: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(ends=ends)], capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert done.stdout.splitlines() == ["main", "exit function"]
    assert errors in done.stderr
    assert bool(done.stderr) == bool(errors)
