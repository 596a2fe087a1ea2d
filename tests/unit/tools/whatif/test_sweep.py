"""A threshold over a range, a table that fits, a run's own recording, and mistakes in the mistaker's words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from moe_trm.cli import main
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.recording.scores import CONFIG_FILE, write_scores
from moe_trm.tools.whatif.commands import candidates, table
from moe_trm.tools.whatif.recording import Recording, load
from moe_trm.tools.whatif.sweep import parse_sweep
from tests.unit.tools.whatif.test_judge import recorded


def a_bundle(folder: Path, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_scores(folder, 1, [recorded()], data_rank=0, data_size=1)
    config = Config.model_validate({"model": {"checkpoint": "none"}, **settings})
    (folder / CONFIG_FILE).write_text(json.dumps(config.dump()))
    return folder


def test_values_are_even_on_the_scale_that_fits() -> None:
    sweep = parse_sweep("trm_max.max_kl=1e-4:1:5")
    assert sweep.values == pytest.approx((1e-4, 1e-3, 1e-2, 1e-1, 1.0))
    assert (sweep.values[0], sweep.values[-1]) == (1e-4, 1.0)
    assert len(parse_sweep("trm_max.max_kl=1e-4:1").values) == 9
    assert parse_sweep("icepop.low=0:0.5:3").values == (0.0, 0.25, 0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trm_max.max_kl", "RULE.THRESHOLD=LOW:HIGH"),
        ("max_kl=1:2", "RULE.THRESHOLD=LOW:HIGH"),
        ("trm_max.max_kl=a:1", "could not convert string to float: 'a'"),
        ("trm_max.max_kl=1:1", "LOW must be below HIGH"),
        ("trm_max.max_kl=0:inf", "both finite"),
        ("trm_max.max_kl=0.1:1:1", "between 2 and"),
        ("trm_max.maxkl=0.1:1", "max_kl"),
        ("trm_maxx.max_kl=0.1:1", "trm_max"),
    ],
)
def test_what_is_no_sweep_is_told(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_sweep(text)


def test_the_curve_is_that_of_the_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios of the engine: 1, 4, 1 and 0.2, 1. A cap below 4 drops one token of five."""
    bundle, drawn = a_bundle(tmp_path / "bundle"), tmp_path / "curve.svg"
    swept = ["--sweep", "icepop.high=2:8:3", "--picture", str(drawn), "--json", str(tmp_path / "out.json")]
    assert main(["whatif", str(bundle), *swept]) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["sweep"]["values"] == [2.0, pytest.approx(4.0), 8.0]
    kept = [one["pooled"]["correction/kept_fraction"] for one in document["candidates"][1:]]
    assert (kept[0], kept[-1]) == (0.6, 0.8)  # the ratio of 0.2 is below the default of `low`
    text = capsys.readouterr().out
    assert "icepop alone, with the recorded loss" in text
    assert "60.00% ████████████████████████" in text
    root = ElementTree.fromstring(drawn.read_text())
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "tokens kept at icepop.high=2: 0.6" in titles


def test_a_recorded_rule_keeps_what_is_beside_it_and_is_calibrated_no_more() -> None:
    rules = [
        {"name": "icepop", "thresholds": {"low": 0.1}, "target_reject_rate": 0.25},
        {"name": "trm_max", "thresholds": {"max_kl": 0.5}},
    ]
    config = Config.model_validate({"model": {"checkpoint": "none"}, "correction": {"rules": rules}})
    recording = Recording("a bundle", config, {1: [recorded()]}, trained=True, grouped=True)
    found = candidates(recording, (), (), (), parse_sweep("icepop.high=2:8:3"))
    assert len(found) == 4
    first, second = found[1].correction.rules
    assert first.thresholds == {"low": 0.1, "high": 2.0}
    assert first.target_reject_rate is None
    assert second == config.correction.rules[1]
    twice = config.model_copy(
        update={"correction": config.correction.model_copy(update={"rules": config.correction.rules * 2})}
    )
    with pytest.raises(ConfigError, match="more than once"):
        parse_sweep("icepop.high=2:8:3").candidates(twice.correction, twice.loss)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_is_longer_than_the_terminal(tmp_path: Path, columns: int) -> None:
    from moe_trm.tools.whatif.commands import _judge

    recording = load(a_bundle(tmp_path))
    long = "[{name: icepop, thresholds: {low: 0.5, high: 5.0}}, {name: trm_max, thresholds: {max_kl: 0.5}}]"
    outcomes = [_judge(one, recording) for one in candidates(recording, [long], (), ["espo", "gspo"])]
    lines = table(recording, outcomes, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert "".join(long.split()) in "".join("".join(lines).split())  # nothing of the name is cut


def test_the_folder_of_a_run_leads_to_its_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the run named it: as a path from where it was started, and moved with the run."""
    bundle = a_bundle(tmp_path / "runs" / "bundle")
    run = tmp_path / "runs" / "one"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}\n")

    def recorded_as(bundle: str | None) -> None:
        config = {"model": {"checkpoint": "none"}, "task": {}, "record": {"bundle": bundle}}
        (run / "config.json").write_text(json.dumps(config))

    monkeypatch.chdir(tmp_path)
    for named in (str(bundle), "runs/bundle", "/gone/bundle"):
        recorded_as(named)
        assert list(load(run).steps) == [1]
    monkeypatch.chdir("/")
    recorded_as("runs/bundle")
    assert list(load(run).steps) == [1]


def test_a_run_without_a_recording_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "config.json").write_text(json.dumps({"record": {"bundle": None}}))
    assert main(["whatif", str(tmp_path)]) == 2
    assert "this run was not recorded" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"record": {"bundle": "/gone/away"}}))
    assert main(["whatif", str(tmp_path)]) == 2
    assert "the recording of this run is not there" in capsys.readouterr().err


def test_a_mistake_in_yaml_is_told_in_yamls_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = a_bundle(tmp_path)
    assert main(["whatif", str(bundle), "--rules", "[{name: icepop}"]) == 2
    told = capsys.readouterr().err
    assert "expected ',' or ']', but got '<stream end>'" in told
    assert "line 1, column 1" in told
    assert main(["whatif", str(bundle), "--rules", "[{nam: icepop}]"]) == 2
    told = capsys.readouterr().err
    assert "0.name: field required" in told
    assert "0.nam: extra inputs are not permitted" in told
