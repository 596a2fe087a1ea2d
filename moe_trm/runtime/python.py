"""The command that runs a module of ours in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

SAFE_PATH = "-P"
"""Python's option that leaves the working folder out of the search: a file there would stand in for any module."""


def run_module(module: str, *arguments: str, interpreter: str = sys.executable) -> list[str]:
    """`python -P -m MODULE ARGUMENTS`."""
    return [interpreter, *module_options(module, *arguments)]


def module_options(module: str, *arguments: str) -> Sequence[str]:
    """The same without the interpreter."""
    return [SAFE_PATH, "-m", module, *arguments]


def run_instead(code: str, command: Sequence[str]) -> list[str]:
    """`command` of `run_module` with the same arguments, given to `code` in place of the module."""
    start = [*command].index("-m")
    return [*command[:start], "-c", code, *command[start + 2 :]]
