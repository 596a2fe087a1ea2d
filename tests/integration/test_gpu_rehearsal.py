"""`python -m benchmarks.gpu --device cpu`: the stages on a small model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.stages import Device, Stage, stages

SHORT = ("random-model", "replay-cost")
PATIENCE_S = 600.0
"""A machine that has other work takes longer than the limits of a session on a GPU."""


@pytest.mark.parametrize(
    "names", [pytest.param(SHORT, marks=pytest.mark.long), pytest.param((), marks=pytest.mark.slow)]
)
def test_the_stages_are_rehearsed_on_a_cpu(
    tmp_path: Path, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def patient(folder: Path, device: Device) -> Iterator[Stage]:
        return (replace(stage, limit_s=PATIENCE_S) for stage in stages(folder, device))

    monkeypatch.setattr("benchmarks.gpu.__main__.stages", patient)
    only = ["--only", *names] if names else []
    status = main(["--device", "cpu", "--budget", "3000", "--folder", str(tmp_path), *only])
    results = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "results").iterdir()}
    failed = [name for name, result in results.items() if result["status"]]
    assert (status, failed) == (0, []), [(tmp_path / "logs" / f"{name}.log").read_text()[-3000:] for name in failed]
    assert results.keys() == {*names} or results.keys() == {stage.name for stage in stages(tmp_path, "cpu")}
    cost = results["replay-cost"]["figures"]
    assert cost["share of log-probs that differ when repeated"] == 0
    assert cost["update, R3 over own, paired"] > 0
    assert "| replay-cost |" in (tmp_path / "page.md").read_text()
