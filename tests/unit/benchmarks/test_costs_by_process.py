"""What each kind of process takes more is found among steps of other speeds and lengths."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import benchmarks.costs_by_process
from benchmarks.costs import EVERYTHING, WHOLE
from benchmarks.costs_by_process import by_kind, kinds_of, main, rows
from benchmarks.in_turn import Turn

MORE = {"server": 1.02, "controller": 1.3, "ranks": 1.05}
KINDS = kinds_of(2)
MS = {"server": 500.0, "controller": 100.0, "ranks": 700.0}
COMMANDS = {
    "server": ("sglang::scheduler", "python -m sglang.launch_server --port 1"),
    "controller": ("python -m moe_trm.rollout.service",),
    "ranks": ("python -m launch.train a.yaml", "python -m launch.ranks 2 a.yaml"),
}


def found_of(rounds: int, jobs: Mapping[str, str]) -> list[list[tuple[str, Turn]]]:
    chance = random.Random(0)

    def turn(kind: str, number: int) -> Turn:
        length = 18 + 4 * chance.random()
        speed = (1 + 0.3 * number) * (length / 20) ** 0.6
        of = {name: MS[name] / 1000 * speed * (MORE[name] if kind == WHOLE else 1.0) for name in MS}
        commands = {command: of[name] / len(own) for name, own in COMMANDS.items() for command in own}
        row = {"response/length_mean": length, "response/length_max": 40.0}
        return Turn(sum(of.values()), sum(of.values()), row, cpu_of=commands)

    return [[(name, turn(kind, number)) for name, kind in jobs.items()] for number in range(rounds)]


def test_processes_are_told_by_their_command_lines() -> None:
    spent = {command: 1.0 for own in COMMANDS.values() for command in own}
    assert by_kind(Turn(1.0, 5.0, {}, cpu_of=spent)) == {"server": 2.0, "controller": 1.0, "ranks": 2.0}


def test_what_each_kind_takes_more_is_found() -> None:
    found: dict[Any, dict[str, Any]] = {row["of a step"]: dict(row) for row in rows(found_of(4, KINDS), KINDS)}
    assert list(found) == ["step", "CPU", *(f"CPU of the {kind}" for kind in MORE)]
    for kind, ratio in MORE.items():
        row = found[f"CPU of the {kind}"]
        assert row["more ms"] / row["ms without"] == pytest.approx(ratio - 1)
        assert row["share"] == pytest.approx(1 - 1 / ratio)
        assert row["from"] <= row["more ms"] <= row["to"]
        assert row["share from"] <= row["share"] <= row["share to"]


def test_the_benchmark_has_as_many_jobs_as_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Mapping[str, str], int]] = []

    def turns(_: Path, checkpoint: str, jobs: Mapping[str, str], rounds: int) -> list[list[tuple[str, Turn]]]:
        asked.append((jobs, rounds))
        return found_of(rounds, jobs)

    monkeypatch.setattr(benchmarks.costs_by_process, "measured", turns)
    monkeypatch.setattr(benchmarks.costs_by_process, "size_of", lambda checkpoint: f"the size of {checkpoint}")
    path = tmp_path / "new" / "rows.json"
    assert main(["--checkpoint", "there", "--jobs", "3", "--rounds", "4", "--json", str(path)]) == 0
    [(jobs, rounds)] = asked
    assert rounds == 4
    assert [list(jobs.values()).count(kind) for kind in (WHOLE, EVERYTHING)] == [3, 3]
    assert "from 4 rounds in turn: the size of there" in path.read_text()


def test_one_job_of_a_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--checkpoint", "there", "--jobs", "1"])
    assert "two of each kind" in capsys.readouterr().err
