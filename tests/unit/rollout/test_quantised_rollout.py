"""A rollout that rounds its weights: refused where nothing can serve it, and called what it is wherever figures are judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_trm.config.schema import Config
from moe_trm.doctor.preflight import check_quantization
from moe_trm.errors import ConfigError
from moe_trm.report.run import read_run
from moe_trm.report.summary import checks
from tests.unit.report.made_run import make_run


def config(**rollout: Any) -> Config:
    return Config.model_validate({"model": {"checkpoint": "m"}, "rollout": rollout, "sync": {"verify": False}})


def test_a_server_to_start_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no quantised kernels"):
        check_quantization(config(quantization="fp8"))
    check_quantization(config())
    check_quantization(config(quantization="fp8", url="http://127.0.0.1:1"))
    check_quantization(config(quantization="fp8", engine="bundle", bundle="b"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_quantization(config(quantization="fp8"))


def test_the_report_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    assert not any("rounded" in check.what for check in checks(read_run(folder)))
    written = json.loads((folder / "config.json").read_text())
    written.setdefault("rollout", {})["quantization"] = "fp8"
    (folder / "config.json").write_text(json.dumps(written))
    (told,) = (check for check in checks(read_run(folder)) if "rounded (fp8)" in check.what)
    assert told.state == "note"
