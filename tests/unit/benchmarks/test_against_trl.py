"""Steps beside a peer's: a ratio is that of two runs of one round, and the peer gets the prompts of all steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers import against_trl
from benchmarks.peers.against_trl import OURS, SKIPPED, TRL, between, rows
from moe_trm.models.tiny.checkpoint import make_checkpoint


def test_ratios_are_those_within_a_round() -> None:
    without, probed = "without it", "with the probe"
    slow_host = {TRL: 4.0, without: 6.0, probed: 8.0}
    found = [{TRL: 1.0, without: 1.2, probed: 1.5}, slow_host, {TRL: 1.0, without: 1.3, probed: 1.4}]
    table = {row["ours"]: row for row in rows(found)}
    assert list(table) == list(OURS)
    assert (table[without]["ratio"], table[without]["lowest"], table[without]["highest"]) == (1.3, 1.2, 1.5)
    assert (table[probed]["seconds"], table[probed][TRL], table[probed]["rounds"]) == (1.5, 1.0, 3)


def test_what_a_run_does_between_two_steps_is_in_the_step() -> None:
    steps = [{"time/step_s": 9.0, "time/unix_s": 100.0}, {"time/step_s": 1.0, "time/unix_s": 101.5}]
    assert between(steps) == [9.0, 1.5]


TRAINER = """
import json, sys
_, checkpoint, problems, steps, path = sys.argv[1:]
assert len(open(problems).readlines()) == 16 * int(steps)
with open(path, "w") as file:
    print(json.dumps({"versions": {"trl": "1.2"}}), file=file)
    for step in range(int(steps)):
        print(json.dumps({"time/step_s": 50.0 if step < 3 else 2.0, "step": step}), file=file)
"""


def test_the_first_steps_of_a_run_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[list[str]]()

    def train(_config: str, settings: list[str], _ranks: int) -> int:
        made.append(settings)
        words = dict(word.split("=", 1) for word in settings)
        run = Path(words["run_dir"]) / words["name"]
        run.mkdir()
        ends = [3.0 * step - 20.0 * (step < SKIPPED) for step in range(1, int(words["train.steps"]) + 1)]
        lines = [f'{{"time/step_s": 1.0, "time/unix_s": {end}}}\n' for end in ends]
        (run / "metrics.jsonl").write_text('{"eval/accuracy": 1.0}\n' + "".join(lines))
        return 0

    monkeypatch.setattr(against_trl, "run_job", train)
    make_checkpoint(tmp_path / "model")
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{TRAINER}")
    python.chmod(0o755)
    table, found = against_trl.against_trl(str(tmp_path / "model"), tmp_path, str(python), 2, 6)
    assert found == [{TRL: 2.0, "with the probe": 3.0, "without it": 3.0}] * 2
    assert [row["ratio"] for row in table] == [1.5, 1.5]
    assert len(made) == 4
    assert all("optimizer.lr=0.0" in settings and f"train.steps={SKIPPED + 6}" in settings for settings in made)
