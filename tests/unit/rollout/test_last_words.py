"""The error of a server that ended is told, and not its arguments."""

from __future__ import annotations

import pytest

from moe_trm.rollout.servers.process import LONGEST_LINE, MOST_LINES, last_words

ARGUMENTS = "[2026-11-22 09:38:33] server_args={'model_path': '/m', 'api_key': '***'}"
CHAIN = """Traceback (most recent call last):
  File "a.py", line 1, in f
    raise OSError(2)

FileNotFoundError: no such file

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 2, in g
    g()
    ^^^
ValueError: the cache is too large
  by 3 GiB
[2026-11-22 09:38:35] Received sigquit from a child process."""
REFUSED = "usage: sglang serve [-h]\n      [--many OPTIONS]\nsglang serve: error: unrecognized arguments: --no"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (f"{ARGUMENTS}\n[2026-11-22 09:38:34] Scheduler hit an exception: {CHAIN}",
         "ValueError: the cache is too large\n  by 3 GiB"),
        (f"{CHAIN}\n{CHAIN}", "ValueError: the cache is too large\n  by 3 GiB"),
        (f"{CHAIN}\nTraceback (most recent call last):\n  File x\nRuntimeError: the scheduler died",
         "ValueError: the cache is too large\n  by 3 GiB\nRuntimeError: the scheduler died"),
        (f"{ARGUMENTS}\n{REFUSED}", "sglang serve: error: unrecognized arguments: --no"),
        (f"one\n{ARGUMENTS}\ntwo", "one\ntwo"),
        ("", ""),
    ],
    ids=["a chain", "repeated", "cause and consequence", "wrong option", "no error", "nothing"],
)  # fmt: skip
def test_what_a_server_said_last(output: str, words: str) -> None:
    assert last_words(output) == words


def test_an_output_without_an_error_is_cut() -> None:
    said = last_words("\n".join("x" * 1000 for _ in range(100))).splitlines()
    assert len(said) == MOST_LINES
    assert {len(line) for line in said} == {LONGEST_LINE}
