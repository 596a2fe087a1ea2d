"""What each kind of process takes more is found among steps of other speeds and lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import benchmarks.costs_by_process
from benchmarks.costs import EVERYTHING, WHOLE, WITHOUT
from benchmarks.costs_by_process import by_kind, kinds_of, main, measured, rows
from benchmarks.in_turn import Turn
from benchmarks.own_arms import SKIPPED, Place
from moe_trm.config import load

MORE = {"server": 1.02, "controller": 1.3, "ranks": 1.05}
KINDS = kinds_of(2)
MS = {"server": 500.0, "controller": 100.0, "ranks": 700.0}
COMMANDS = {
    "server": ("sglang::scheduler", "python -m sglang.launch_server --port 1"),
    "controller": ("python -m moe_trm.rollout.service",),
    "ranks": ("python -m launch.train a.yaml", "python -m launch.ranks 2 a.yaml"),
}


def found_of(rounds: int) -> list[list[tuple[str, Turn]]]:
    chance = random.Random(0)

    def turn(kind: str, number: int) -> Turn:
        length = 18 + 4 * chance.random()
        speed = (1 + 0.3 * number) * (length / 20) ** 0.6
        of = {name: MS[name] / 1000 * speed * (MORE[name] if kind == WHOLE else 1.0) for name in MS}
        commands = {command: of[name] / len(own) for name, own in COMMANDS.items() for command in own}
        row = {"response/length_mean": length, "response/length_max": 40.0}
        return Turn(sum(of.values()), sum(of.values()), row, cpu_of=commands)

    return [[(name, turn(kind, number)) for name, kind in KINDS.items()] for number in range(rounds)]


def test_processes_are_told_by_their_command_lines() -> None:
    spent = {command: 1.0 for own in COMMANDS.values() for command in own}
    assert by_kind(Turn(1.0, 5.0, {}, cpu_of=spent)) == {"server": 2.0, "controller": 1.0, "ranks": 2.0}


def test_what_each_kind_takes_more_is_found() -> None:
    found: dict[Any, dict[str, Any]] = {row["of a step"]: dict(row) for row in rows(found_of(4), KINDS)}
    assert list(found) == ["step", "CPU", *(f"CPU of the {kind}" for kind in MORE)]
    for kind, ratio in MORE.items():
        row = found[f"CPU of the {kind}"]
        assert row["more ms"] / row["ms without"] == pytest.approx(ratio - 1)
        assert row["share"] == pytest.approx(1 - 1 / ratio)
        assert row["from"] <= row["more ms"] <= row["to"]
        assert row["share from"] <= row["share"] <= row["share to"]


def test_jobs_of_each_kind_with_steps_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: dict[str, tuple[Sequence[str], bool]] = {}

    class Job:
        def __init__(self, steps: int) -> None:
            self.left = steps

        def turn(self) -> Turn:
            self.left -= 1
            return Turn(1.0, 1.0, {})

    @contextmanager
    def place(folder: Path) -> Iterator[Place]:
        yield Place(folder, "ranks", "engine")

    @contextmanager
    def arm(_: Place, name: str, overrides: Sequence[str], *, records: bool) -> Iterator[Job]:
        jobs[name] = overrides, records
        job = Job(load("configs/quickstart.yaml", overrides).train.steps - SKIPPED)
        yield job
        assert job.left == 1, "the last step of a run is another one"

    monkeypatch.setattr(benchmarks.costs_by_process, "place_in", place)
    monkeypatch.setattr(benchmarks.costs_by_process, "own_arm", arm)
    found = list(measured(tmp_path, "model", KINDS, 3))
    assert [sorted(name for name, _ in made) for made in found] == [sorted(KINDS)] * 3
    for name, (overrides, records) in jobs.items():
        assert {*WITHOUT[KINDS[name]], "model.checkpoint=model", "optimizer.lr=0.0"} <= set(overrides)
        assert records == (KINDS[name] == WHOLE)
    assert list(jobs) == list(KINDS)
    assert [list(KINDS.values()).count(kind) for kind in (WHOLE, EVERYTHING)] == [2, 2]


def test_one_job_of_a_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--checkpoint", "there", "--jobs", "1"])
    assert "two of each kind" in capsys.readouterr().err
