"""The pages in a real headless Chromium: no errors, nothing fetched, readable on a phone, exact values at the pointer.

Needs a browser on the machine (Debian: `apt-get install chromium-headless-shell`); skipped where there is none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from moe_trm.observe.report.commands import write
from tests.unit.observe.made_transcripts import made_transcripts
from tests.unit.observe.report.made_run import make_run
from tests.unit.observe.report.test_session_tree import page_of
from tests.unit.rollout.agents.made_sessions import sample_of
from tests.unit.tools.experiment.scripted import Scripted

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

PHONE: ViewportSize = {"width": 360, "height": 740}
DESK: ViewportSize = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    one = make_run(folder / "one", steps=30)
    other = make_run(folder / ("a-name-" * 12), done=2, replay={"mode": "R2"})
    return {
        "run": write([one]),
        "two": write([one, other]),
        "transcripts": made_transcripts(folder).with_suffix(".html"),
        "experiment": made_experiment(folder / "experiment"),
        "session": page_of(folder / "session", [sample_of([-1, *range(12), 0, 3], "trajectory")], 9).with_suffix(
            ".html"
        ),
    }


def made_experiment(folder: Path) -> Path:
    """The page of one with a failed run and a long reason."""
    folder.mkdir()
    trial = Scripted(folder, steps=8)
    trial.tell({"R3-seed2": {"fails_at": 1}})
    assert trial.run(jobs=4) == 1
    return trial.out / "report.html"


class Visit:
    """An opened page and everything it complained about or asked for."""

    def __init__(
        self, browser: Browser, path: Path, viewport: ViewportSize, scheme: Literal["dark", "light"] = "light"
    ) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        context = browser.new_context(viewport=viewport, color_scheme=scheme, offline=True, has_touch=True)
        self.page: Page = context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())


def tip_lines(page: Page) -> list[str]:
    return [line for line in page.locator("#tip").inner_text().split("\n") if line]


@pytest.mark.parametrize("name", ["run", "two", "transcripts", "experiment", "session"])
@pytest.mark.parametrize("viewport", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_offline_without_errors_and_without_sideways_scrolling(
    browser: Browser, pages: dict[str, Path], name: str, viewport: ViewportSize, scheme: Literal["light", "dark"]
) -> None:
    visit = Visit(browser, pages[name], viewport, scheme)
    for details in visit.page.locator("details").all():
        details.evaluate("element => { element.open = true; }")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, paper.removeprefix("rgb(").removesuffix(")").split(","))) / 3
    assert (brightness < 60) == (scheme == "dark")
    assert visit.requests == [pages[name].as_uri()]
    assert visit.complaints == []
    visit.page.context.close()


FAULTS = """() => {
    const found = [], number = /(?<![\\w.-])[+-]?\\d[\\d.]*(?:e[+-]?\\d+)?%?/g;
    const told = (what, text) => found.push(`${what}: ${text}`);
    const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        for (const match of node.data.matchAll(number)) {
            const range = document.createRange();
            range.setStart(node, match.index);
            range.setEnd(node, match.index + match[0].length);
            const lines = [...range.getClientRects()].filter(rect => rect.width);
            if (new Set(lines.map(rect => Math.round(rect.top))).size > 1) told('broken', node.data);
            const frame = node.parentElement.closest('svg, .wide');
            const [low, high] = frame && frame.tagName === 'svg'
                ? [frame.getBoundingClientRect().left, frame.getBoundingClientRect().right]
                : frame ? [0, Infinity] : [0, document.documentElement.clientWidth];
            if (lines.some(rect => rect.left < low - 1 || rect.right > high + 1)) told('clipped', node.data);
        }
    }
    for (const chart of document.querySelectorAll('svg.chart')) {
        const texts = [...chart.querySelectorAll('text')];
        const labels = texts.map(text => [text.textContent, text.getBoundingClientRect()]);
        labels.forEach(([one, a], place) => labels.slice(place + 1).forEach(([other, b]) => {
            if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
                told('overlapping', `${one} and ${other} in ${chart.ariaLabel}`);
        }));
    }
    return [...new Set(found)];
}"""
"""Numbers that are broken over lines or cut at an edge, and labels of a chart that run into each other."""


@pytest.mark.parametrize("name", ["two", "experiment"])
@pytest.mark.parametrize("width", [1300, 420])
def test_no_number_of_a_compared_page_is_broken_or_clipped(
    browser: Browser, pages: dict[str, Path], name: str, width: int, tmp_path: Path
) -> None:
    visit = Visit(browser, pages[name], {"width": width, "height": 900})
    for details in visit.page.locator("details").all():
        details.evaluate("element => { element.open = true; }")
    visit.page.screenshot(path=tmp_path / f"{name}-{width}.png", full_page=True)
    assert visit.page.evaluate(FAULTS) == []
    visit.page.context.close()


def test_letters_are_large_enough_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["run"], PHONE)
    height = visit.page.evaluate("document.querySelector('svg.chart text').getBoundingClientRect().height")
    assert height >= 9
    visit.page.context.close()


def test_the_pointer_and_the_arrow_keys_tell_exact_values(browser: Browser, pages: dict[str, Path]) -> None:
    rows = [json.loads(line) for line in (pages["run"].parent / "metrics.jsonl").read_text().splitlines()]
    visit = Visit(browser, pages["run"], DESK)
    chart = visit.page.locator("svg.chart[aria-label='Reward and evaluation']")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    said = tip_lines(visit.page)
    step = int(said[0].removeprefix("step "))
    assert 10 < step < 20
    assert f"reward/mean = {rows[step]['reward/mean']!r}" in said
    chart.focus()
    visit.page.keyboard.press("ArrowRight")
    assert f"reward/mean = {rows[step + 1]['reward/mean']!r}" in tip_lines(visit.page)
    visit.page.keyboard.press("Escape")
    assert not visit.page.locator("#tip").is_visible()
    heat = visit.page.locator("svg.chart[aria-label='Flips by layer: live router']")
    heat.scroll_into_view_if_needed()
    box = heat.bounding_box()
    assert box is not None
    visit.page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 12 * box["width"] / 360)
    said = tip_lines(visit.page)
    layer = rows[int(said[0].removeprefix("step "))]["routing/local_flip_rate/layer_0"]
    name, _, value = said[1].partition(" = ")
    assert (name, float(value)) == ("routing/local_flip_rate/layer_0", layer)
    assert visit.complaints == []
    visit.page.context.close()


def test_a_token_tells_its_figures(browser: Browser, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["transcripts"], PHONE)
    data = json.loads(visit.page.locator("#data").inner_text())["rollouts"][0]
    place = next(place for place, keep in enumerate(data["keep"]) if keep is False)
    visit.page.locator(".tokens[data-rollout='0'] span").nth(place).tap()
    said = tip_lines(visit.page)
    assert f"id {data['ids'][place]}, turn 0, sampled" in said[0]
    assert said[2].startswith("engine log-ratio ")
    assert float(said[2].rpartition(" ")[2]) == data["log_ratio"][place]
    assert said[3] == "weight 0, rejected"
    visit.page.locator("h1").tap()
    assert not visit.page.locator("#tip").is_visible()
    assert visit.complaints == []
    visit.page.context.close()
