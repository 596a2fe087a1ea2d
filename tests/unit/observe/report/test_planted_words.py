"""No word of a run, of its servers or of who can write its files becomes a part of the page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

from moe_trm.observe.report.page import render
from moe_trm.run_folder.run import CHANGES_FILE, CHOICES, SERVERS_FILE, read_run
from tests.unit.observe.report.made_run import make_run

PLANTED = "<img src=x onerror=alert(1)>\"'&<script>alert(2)</script>"


def planted_run(folder: Path) -> Path:
    """Every text that a file of the run can have has markup."""
    run = make_run(folder)
    config = json.loads((run / "config.json").read_text())
    config["model"]["checkpoint"] = config["loss"]["name"] = config["name"] = PLANTED
    config["correction"]["rules"] = [{"name": PLANTED, "thresholds": {PLANTED: PLANTED}}]
    (run / "config.json").write_text(json.dumps(config))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {PLANTED: PLANTED, f"records/rejected/{PLANTED}": 1.0, f"reward/{PLANTED}/mean": 0.5 + row["step"]}
        row |= {f"eval/{PLANTED}/accuracy": row["step"] / 10, f"correction/{PLANTED}/kept_fraction": 0.5}
        row |= {"verdict": PLANTED, "verdict/case": PLANTED if row["step"] % 2 else "ok", "verdict/config": PLANTED}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / CHOICES).write_text(json.dumps([{"key": PLANTED, "value": PLANTED, "reason": PLANTED}]))
    lost = {"url": PLANTED, "lost": True, "why": PLANTED, "time/unix_s": 1.0}
    (run / SERVERS_FILE).write_text(
        json.dumps(lost) + "\n" + json.dumps({**lost, "lost": False, "seconds": 3.0}) + "\n"
    )
    changes = [
        {"step": 1, "key": PLANTED, "old": PLANTED, "new": {PLANTED: [PLANTED]}},
        {"step": PLANTED, "key": "name", "old": 1, "new": 2},
    ]
    (run / CHANGES_FILE).write_text("".join(json.dumps(change) + "\n" for change in changes) + "{damaged\n[]\n")
    failure = {"kind": PLANTED, "told": PLANTED, "step": 3, "phase": PLANTED, "rank": 0}
    (run / "run.json").write_text(json.dumps({"state": "failed", "step": 3, "unix_s": 1.0, "failure": failure}))
    return run


def test_planted_markup_is_text(tmp_path: Path) -> None:
    one, two = (read_run(planted_run(tmp_path / name)) for name in ("one", "two"))
    for page in (render([one]), render([one, two])):
        assert "onerror" in page
        assert "<img" not in page
        assert page.count("<script") == 2


def test_the_page_lets_its_own_script_run_and_no_other(tmp_path: Path) -> None:
    page = render([read_run(make_run(tmp_path / "run"))])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert policy is not None
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy[1]
    assert "default-src 'none'" in policy[1]


def test_damaged_files_beside_the_metrics_are_no_reason_to_show_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in (CHOICES, SERVERS_FILE, CHANGES_FILE, "run.json"):
        for content in (b"", b"{", b"[1]", b"\xff\n", b'[{"key": 3}]', b'{"step": 1}\n', b"null\n"):
            (run / name).write_bytes(content)
            read = read_run(run)
            assert (f"{CHOICES} cannot be read" in " ".join(read.notes)) == (name == CHOICES)
            assert "reward/mean" in render([read])
        (run / name).unlink()
