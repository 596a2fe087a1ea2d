"""Steps beside a peer's: two turns of a round are one measurement, and each side has slopes of its own."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

from benchmarks.in_turn import Turn
from benchmarks.peers.against_trl import OURS, TRL, mean_of, rows, trl_arm, versions_in
from moe_trm.models.tiny.checkpoint import make_checkpoint

RATIO = {"with the probe": 1.5, "without it": 1.2}


def turn(seconds: float, length: float, stolen: float) -> Turn:
    return Turn(seconds, 1.0, {"response/length_mean": length, "response/length_max": 2 * length}, stolen, 0.0)


def found_of(rounds: int, noise: float) -> list[list[tuple[str, Turn]]]:
    """The host slows ours more than TRL, and longer answers slow TRL more than ours."""
    chance = random.Random(0)

    def one(name: str, number: int, probes: bool) -> tuple[str, Turn]:
        length, stolen = 10 * math.exp(chance.gauss(0, 0.1)), 0.1 * chance.random()
        seconds = (1 + number / rounds) * math.exp(noise * chance.gauss(0, 1))
        if name == TRL:
            return name, turn(seconds * (length / 10) ** 0.8, length, stolen)
        seconds *= RATIO[name] * (length / 10) ** 0.2 * ((1 - stolen) / 0.95) ** -2
        return name, turn(seconds * ((1.2 if probes else 0.8) if name == "with the probe" else 1), length, stolen)

    return [
        [one(name, number, probes) for probes in (True, False) for name in (TRL, *OURS)] for number in range(rounds)
    ]


def test_a_step_with_a_probe_counts_as_often_as_one_without() -> None:
    made = [("a", turn(1.0, 8.0, 0.0)), ("b", turn(9.0, 9.0, 0.0)), ("a", turn(3.0, 12.0, 0.5))]
    found = mean_of("a", 7, made)
    assert (found.arm, found.round, found.value) == ("a", 7, 2.0)
    assert found.chance == (10.0, 20.0, 0.75, 1.0)


def test_ratios_are_found_though_each_side_has_its_own_slopes() -> None:
    found = list(rows(found_of(40, 0.03), "1.16.0"))
    assert [row["ours"] for row in found] == list(OURS)
    for row in found:
        low, high = float(row["from"]), float(row["to"])
        assert low < float(row["ratio"]) < high
        assert low - 0.01 < RATIO[str(row["ours"])] < high + 0.01
        assert high - low < 0.1
        assert row["rounds"] == 40
        assert {"seconds", "trl 1.16.0"} < row.keys()


TRAINER = """
import json, signal, sys
_, checkpoint, problems, steps, path = sys.argv[1:]
assert len(open(problems).readlines()) == 16 * int(steps)
with open(path, "w") as file:
    print(json.dumps({"versions": {"trl": "1.2"}}), file=file, flush=True)
    for step in range(3):
        print(json.dumps({"time/step_s": 1.0, "step": step}), file=file, flush=True)
    signal.pause()
"""


def test_the_peer_is_started_with_the_prompts_of_all_steps(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{TRAINER}")
    python.chmod(0o755)
    with trl_arm(str(tmp_path / "model"), tmp_path, str(python), 5) as arm:
        assert len(arm.pids) == 1
    assert versions_in(tmp_path / "trl.jsonl") == {"trl": "1.2"}
