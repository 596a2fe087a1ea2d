"""The site of `make docs`: its pages name what exists, and it builds without a warning."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
SETTINGS = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
NAVIGATION = re.findall(r"[\w/]+\.md", str(SETTINGS["nav"]))
OUTSIDE = re.findall(r'^    "([^"]+\.md)": "([^"]+)"', (DOCS / "hooks.py").read_text(encoding="utf-8"), re.MULTILINE)
MODULES = [
    name
    for page in sorted(DOCS.glob("reference/*.md"))
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)
]
DOCS_PYTHON = REPOSITORY / ".venv-docs" / "bin" / "python"


def test_every_page_is_in_the_navigation_once() -> None:
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(NAVIGATION) == sorted([*pages, *(place for _, place in OUTSIDE)])


def test_pages_outside_docs_exist() -> None:
    assert OUTSIDE
    for source, _ in OUTSIDE:
        assert (REPOSITORY / source).is_file(), source


@pytest.mark.parametrize("module", MODULES)
def test_modules_of_the_reference_exist(module: str) -> None:
    assert import_module(module)


def test_the_reference_has_what_tools_outside_rely_on() -> None:
    expected = {"ratios", "types", "errors", "corrections", "losses", "diagnostics", "config", "learner.protocol"}
    assert {*(f"moe_trm.{name}" for name in expected), "routing"} <= set(MODULES)


@pytest.mark.slow
@pytest.mark.skipif(not DOCS_PYTHON.exists(), reason="mkdocs is not installed: make docs installs it")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [str(DOCS_PYTHON), "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "reference" / "ratios.html").read_text(encoding="utf-8")
    assert 'id="moe_trm.ratios.LogRatios"' in reference
    assert 'href="tasks.html' in (tmp_path / "index.html").read_text(encoding="utf-8")
