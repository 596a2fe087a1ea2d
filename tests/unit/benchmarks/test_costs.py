"""The share of a part is found among rounds of other speeds and answers of other lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import benchmarks.costs
import benchmarks.start_model
from benchmarks.costs import EVERYTHING, OFTEN, SKIPPED_ROUNDS, WHOLE, WITHOUT, main, measured, rows, shares
from benchmarks.in_turn import Turn, turns_of
from benchmarks.own_arms import SKIPPED
from moe_trm.config import load
from moe_trm.models.hf_config import read_hf_config

SHARES = {EVERYTHING: 0.05, "sampling masks": 0.02, "correction": 0.0, "proof of pushes": 0.01}
"""That of routes is not there: 0.04."""
PARTS = [name for name in WITHOUT if name != WHOLE]


def found_of(noise: float, rounds: int) -> list[list[tuple[str, Turn]]]:
    """Turns whose seconds are known but for `noise`: they depend on the round, on the answers and on the host."""
    chance = random.Random(0)

    def turn(name: str, number: int) -> Turn:
        length, longest = 18 + 4 * chance.random(), 40 + 8 * chance.random()
        whole = (1.0 + 0.3 * number) * length**0.6 * longest**0.2 * (1 + noise * chance.gauss(0, 1))
        stolen, others = 0.3 * chance.random(), 0.5 * chance.random()
        whole *= (1 - stolen) ** -1.2 * (1 + others)
        row = {"response/length_mean": length, "response/length_max": longest}
        return Turn(whole, whole * (1 - (0.0 if name == WHOLE else SHARES.get(name, 0.04))), row, stolen, others)

    names = [name for name in WITHOUT for _ in range(OFTEN.get(name, 1))]
    return [[(name, turn(name, number)) for name in names] for number in range(rounds)]


def test_shares_are_found_exactly_where_nothing_else_moves() -> None:
    found = found_of(0.0, 3)
    cpu = shares(found, lambda turn: turn.cpu_seconds)
    assert {name: cpu[name].value for name in PARTS} == pytest.approx(
        {name: SHARES.get(name, 0.04) for name in PARTS}, abs=1e-9
    )
    assert shares(found, lambda turn: turn.seconds)[EVERYTHING].value == pytest.approx(0.0, abs=1e-9)


def test_intervals_hold_the_share_and_grow_with_the_noise() -> None:
    widths = []
    for noise in (0.01, 0.03):
        found = shares(found_of(noise, 10), lambda turn: turn.cpu_seconds)
        intervals = {name: found[name].interval for name in PARTS}
        for name, interval in intervals.items():
            assert interval[0] < found[name].value < interval[1]
            assert interval[0] - 0.01 < SHARES.get(name, 0.04) < interval[1] + 0.01
        of_all, of_one = intervals[EVERYTHING], intervals["correction"]
        assert of_all[1] - of_all[0] < of_one[1] - of_one[0], "the sum has more turns"
        widths.append(of_all[1] - of_all[0])
    assert 2 * widths[0] < widths[1]


def test_a_row_for_every_part_after_that_of_the_whole() -> None:
    made = found_of(0.01, 3)
    found = list(rows(made))
    assert [row["without"] for row in found] == ["-", *PARTS]
    assert [row["steps"] for row in found] == [6, *(3 * OFTEN.get(name, 1) for name in PARTS)]
    assert "of the CPU" not in found[0]
    assert {"of the step", "step from", "step to", "of the CPU", "CPU from", "CPU to"} < found[1].keys()
    assert len(turns_of(made)) == sum(map(len, made))


@pytest.mark.parametrize("often", [OFTEN, None])
def test_every_job_has_its_settings_and_steps_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: Mapping[str, int] | None
) -> None:
    """Two jobs without the same part are two jobs."""
    without = {name: name for name in WITHOUT} | {"once more": EVERYTHING}
    jobs: dict[str, tuple[Sequence[str], bool]] = {}

    class Job:
        def __init__(self, steps: int) -> None:
            self.left = steps

        def turn(self) -> Turn:
            self.left -= 1
            return Turn(1.0, 1.0, {})

    @contextmanager
    def place(folder: Path) -> Iterator[Path]:
        yield folder

    @contextmanager
    def arm(_: Path, name: str, overrides: Sequence[str], *, records: bool) -> Iterator[Job]:
        jobs[name] = overrides, records
        job = Job(load("configs/quickstart.yaml", overrides).train.steps - SKIPPED)
        yield job
        assert job.left >= 1, "the last step of a run is another one"

    monkeypatch.setattr(benchmarks.costs, "place_in", place)
    monkeypatch.setattr(benchmarks.costs, "own_arm", arm)
    found = list(measured(tmp_path, "model", without, 2, often))
    assert len(found) == 2
    assert list(jobs) == list(without)
    for name, (overrides, records) in jobs.items():
        assert {*WITHOUT[without[name]], "model.checkpoint=model", "optimizer.lr=0.0"} <= set(overrides)
        assert records == (without[name] not in ("routes, their replay and its proof", EVERYTHING))
    assert SKIPPED_ROUNDS


def test_a_model_of_any_shape_that_was_taught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(_: Path, checkpoint: str, _jobs: object, rounds: int, _often: object) -> list[list[tuple[str, Turn]]]:
        config = read_hf_config(Path(checkpoint))
        names = ("hidden_size", "num_hidden_layers", "num_local_experts", "num_experts_per_tok")
        assert [config[name] for name in names] == [64, 2, 8, 2]
        assert config["num_attention_heads"] * config["head_dim"] == 64
        return found_of(0.01, rounds)

    monkeypatch.setattr(benchmarks.costs, "measured", look)
    monkeypatch.setattr(benchmarks.start_model, "SAID_EVERY", 2)
    shape = ["--hidden", "64", "--layers", "2", "--experts", "8", "--top-k", "2", "--taught", "4"]
    assert main([*shape, "--rounds", "3", "--json", str(tmp_path / "rows.json")]) == 0
    assert "0.239 million parameters, 0.0916 million for each token" in (tmp_path / "rows.json").read_text()
    first, second = (float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines() if "of 4" in line)
    assert second < first, "it learns"
    for both in ([], ["--checkpoint", "there", *shape]):
        with pytest.raises(SystemExit):
            main(both)
