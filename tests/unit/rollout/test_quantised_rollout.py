"""A rollout that rounds its weights, named as such wherever figures are judged. Refusals: tests/unit/config."""

from __future__ import annotations

import json
from pathlib import Path

from moe_trm.observe.report.summary import checks
from moe_trm.run_folder.run import read_run
from tests.unit.observe.report.made_run import make_run


def test_the_report_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    assert not any("rounded" in check.what for check in checks(read_run(folder)))
    written = json.loads((folder / "config.json").read_text())
    written.setdefault("rollout", {})["quantization"] = "fp8"
    (folder / "config.json").write_text(json.dumps(written))
    (told,) = (check for check in checks(read_run(folder)) if "rounded (fp8)" in check.what)
    assert told.state == "note"
