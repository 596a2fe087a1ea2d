"""A rollout server that is lost is on the panel, in the lines, in the run folder and in the report, with its reason."""

from __future__ import annotations

import io
import time
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from moe_trm.observe.lines import ProgressLines
from moe_trm.observe.panel import LivePanel
from moe_trm.observe.report.page import render
from moe_trm.observe.server_log import ServerLog
from moe_trm.run_folder.run import SERVERS_FILE, Run
from moe_trm.types import ServerState

WELL = (ServerState("http://one"), ServerState("http://two"))
LOST = (ServerState("http://one"), ServerState("http://two", 3.0, "it was killed"))


def test_the_panel_says_how_long_and_why_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    live = LivePanel("my run", 8, Console(file=io.StringIO(), force_terminal=False, width=120))

    def shown() -> str:
        text = io.StringIO()
        Console(file=text, width=120, force_terminal=False).print(live)
        return text.getvalue()

    live.servers(LOST)
    now[0] += 60
    assert "rollout server http://two is out of service for 1 min 03 s, 1 of 2 in service: it was killed" in shown()
    live.servers(WELL)
    assert "out of service" not in shown()
    live.close()


def test_a_server_that_loads_has_a_line_now_and_again() -> None:
    stream = io.StringIO()
    lines = ProgressLines(8, stream)
    for waited_s in (0.5, 1.0, 20.0, 31.0, 32.0, 70.0):
        lines.servers((ServerState("http://one", awaited_s=waited_s, limit_s=1800.0), WELL[1]))
    lines.servers(WELL)
    assert [line.strip() for line in stream.getvalue().splitlines()] == [
        f"waiting for rollout server http://one: {waited_s} s of at most 1800 s" for waited_s in (0, 31, 70)
    ]


def test_the_panel_shows_a_server_that_loads() -> None:
    live = LivePanel("my run", 8, Console(file=io.StringIO(), force_terminal=False, width=120))
    live.servers((ServerState("http://one", awaited_s=5.0, limit_s=180.0),))
    text = io.StringIO()
    Console(file=text, width=120, force_terminal=False).print(live)
    assert "waiting for rollout server http://one: 5 s of at most 180 s" in text.getvalue()
    live.close()


def test_lines_tell_each_change_once() -> None:
    stream = io.StringIO()
    lines = ProgressLines(8, stream)
    for states in (WELL, LOST, LOST, (WELL[0], ServerState("http://two", 9.0, "it was killed")), WELL, WELL):
        lines.servers(states)
    assert [line.strip() for line in stream.getvalue().splitlines()] == [
        "rollout server http://two is out of service: it was killed",
        "rollout server http://two is back after about 9 s (it was killed)",
    ]


def test_the_run_folder_and_the_report_keep_it(tmp_path: Path) -> None:
    log = ServerLog(tmp_path)
    log.servers(WELL)
    assert not (tmp_path / SERVERS_FILE).exists()
    log.servers(LOST)
    run = Run(tmp_path, {}, [{"step": 1}], ())
    assert "Out of service at the last look: http://two" in render([run])
    log.servers(WELL)
    changes = [orjson.loads(line) for line in (tmp_path / SERVERS_FILE).read_bytes().splitlines()]
    assert [change["lost"] for change in changes] == [True, False]
    page = render([run])
    assert "it was killed" in page
    assert "back after about 3 s" in page
    assert "last look" not in page
