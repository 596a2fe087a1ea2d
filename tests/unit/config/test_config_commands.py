"""`moe-trm config`: explain, show, diff, and errors of one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_trm.cli import main
from moe_trm.config import load
from moe_trm.config.fields import lookup, walk
from moe_trm.config.schema import Config


def test_every_setting_is_documented_and_explainable(capsys: pytest.CaptureFixture[str]) -> None:
    settings = list(walk())
    assert len(settings) > 60
    assert [setting.path for setting in settings if not setting.doc] == []
    for setting in settings:
        assert lookup(setting.path.replace("*", "0")) == setting
        assert setting.section is None or setting.section.__doc__
    assert main(["config", "explain", "replay.mode"]) == 0
    told = capsys.readouterr().out
    assert "R2" in told
    assert "default: auto" in told
    assert main(["config", "explain", "replay.mod"]) == 2
    assert "did you mean replay.mode?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("ln_trm", ["delta: number, required", "max_score: number, required; or chosen by target_reject_rate"]),
        ("trm_max", ["divergence: one of sampled, exact, default sampled"]),
        ("ppo_clip", ["dual_clip: number or none, default null"]),
        ("examples/own_methods/methods.py:leaky_clip", ["leak: number, default 0.1"]),
        (
            "examples/own_methods/methods.py:negative_gap_mask",
            ["max_gap: number, default 1.0; or chosen by target_reject_rate"],
        ),
    ],
)
def test_a_correction_or_a_loss_is_explained_with_its_parameters(
    name: str, lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert main(["config", "explain", name]) == 0
    printed = capsys.readouterr().out
    assert set(lines) <= {line.strip() for line in printed.splitlines()}


def test_show_prints_every_value_with_its_source(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(file), "replay.mode=R2"]) == 0
    lines = {line.split(":")[0]: line.rpartition("# ")[2] for line in capsys.readouterr().out.splitlines()}
    assert (lines["replay.mode"], lines["optimizer.lr"], lines["seed"]) == ("override", "file", "default")
    assert set(lines) == {setting.path for setting in walk() if setting.section is None and "*" not in setting.path}
    assert main(["config", "show", "--json", str(file)]) == 0
    assert Config.model_validate_json(capsys.readouterr().out) == load(file)


def test_diff(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("model: {checkpoint: start}\noptimizer: {lr: 1e-3}\n")
    assert main(["config", "diff", str(file), str(other)]) == 1
    assert capsys.readouterr().out == "optimizer.lr: 0.0003 -> 0.001\n"
    assert main(["config", "diff", str(file), str(file)]) == 0


def test_an_error_is_one_message_and_exit_status_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", str(file), "replay.mod=R3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: configuration refused")
    assert "Traceback" not in error
