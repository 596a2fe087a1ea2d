"""The distribution: its version stands once, and type checkers find the annotations."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moe_trm
from moe_trm.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_stands_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", moe_trm.__version__)
    assert "version" not in PROJECT["project"]
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "moe_trm.__version__"}


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"moe-trm {moe_trm.__version__}\n"


def test_a_reader_that_wants_no_more_ends_it_quietly() -> None:
    """As in `moe-trm config show FILE | head`."""
    nobody, end = os.pipe()
    os.close(nobody)
    command = [sys.executable, "-m", "moe_trm", "config", "show", str(REPOSITORY / "configs" / "quickstart.yaml")]
    try:
        done = subprocess.run(command, stdout=end, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(end)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_the_changelog_has_this_version() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert moe_trm.__version__.partition(".dev")[0] in released


@pytest.mark.parametrize("package", ["moe_trm", "routing", "launch"])
def test_annotations_are_found_by_type_checkers(package: str) -> None:
    assert (REPOSITORY / package / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][package]
