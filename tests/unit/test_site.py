"""The site of `make docs`: its pages name what exists, and it builds without a warning."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from playwright.sync_api import Browser

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of the build is an error."""
    if not DOCS_PYTHON.exists():
        pytest.skip("mkdocs is not installed: make docs installs it")
    out = tmp_path_factory.mktemp("site")
    command = [str(DOCS_PYTHON), "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return out


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    reference = (site / "reference" / "ratios.html").read_text(encoding="utf-8")
    assert 'id="moe_trm.ratios.LogRatios"' in reference
    assert 'href="tasks.html' in (site / "index.html").read_text(encoding="utf-8")
    assert not list(site.rglob("__pycache__"))


QUESTIONS = {
    "Slurm on 4 nodes": "long_runs.html#slurm-on-several-nodes-line-by-line",
    "R2 or R3": "choosing.html#r2-or-r3",
    "R2/R3": "choosing.html#r2-or-r3",
    "reward collapses": "troubleshooting.html#reward-collapses-after-some-steps",
    "own environment": "tasks.html#rollout-function-several-turns-tools-environments",
    "what is engine/k3_kl": "report.html#what-is-enginek3_kl-the-mismatch-of-the-engines",
    "k3_kl": "report.html#what-is-enginek3_kl-the-mismatch-of-the-engines",
    "stuck at push": "troubleshooting.html#stuck-at-a-push",
    "out of memory": "troubleshooting.html#out-of-memory",
    "nothing trains": "troubleshooting.html#nothing-trains",
}
"""What people type into the site's search, and the section that has the answer."""


@pytest.mark.slow
def test_the_search_finds_the_section_with_the_answer_first_and_works_from_disk(browser: Browser, site: Path) -> None:
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.goto((site / "index.html").as_uri())
    field = page.locator("input.md-search__input")
    field.click()
    page.wait_for_function("document.querySelector('.md-search-result__meta').innerText.startsWith('Type')")
    first = {}
    for question in QUESTIONS:
        field.fill("")
        field.press("Backspace")
        page.wait_for_function("document.querySelector('.md-search-result__meta').innerText.startsWith('Type')")
        field.fill(question[:-1])
        field.press(question[-1])
        page.wait_for_function("document.querySelector('.md-search-result__meta').innerText.includes('matching')")
        links = page.locator("li.md-search-result__item").first.locator(":scope > a").all()
        shown = [str(link.get_attribute("href")).removeprefix(f"{site.as_uri()}/") for link in links]
        first[question] = next((link for link in shown if link == QUESTIONS[question]), shown)
    page.close()
    assert first == QUESTIONS
    assert complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [1300, 420])
def test_no_line_of_code_is_cut_at_the_right_edge(browser: Browser, site: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    cut = {}
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        blocks = "[...document.querySelectorAll('pre > code')].filter(code => code.scrollWidth > code.clientWidth + 1)"
        if found := page.evaluate(f"{blocks}.map(code => code.textContent.slice(0, 80))"):
            cut[path.name] = found
    page.close()
    assert cut == {}
