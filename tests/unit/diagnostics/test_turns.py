"""Mismatch by turn, by hand: stale samples, rows that begin late, and turns without a token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moe_trm.corrections.evidence import Evidence
from moe_trm.diagnostics import by_age, by_place, by_server, by_turn
from moe_trm.methods.summable import add, finalize
from moe_trm.ratios import LogRatios

TURNS = torch.tensor([[0, 0, 1, 1, 7], [2, 2, 8, 9, 2]])
MASK = torch.tensor([[1, 0, 1, 1, 1], [0, 1, 1, 1, 0]]).bool()
"""Row 1 is a row of a session: its first answers are context, and nothing of them is scored."""
SCORED = [0.5, -0.25, 0.0, 1.0, 0.125, 0.3, -0.3]
ENGINE = torch.tensor([[0.5, 9.0, -0.25, 0.0, 1.0], [9.0, 0.125, 0.3, -0.3, 9.0]], dtype=torch.float64)


def evidence(*, behavior: bool = True, lag: float = 0.0, turns: torch.Tensor | None = TURNS) -> Evidence:
    rollout = torch.zeros_like(ENGINE)
    proximal = ENGINE + lag
    ratios = LogRatios(rollout, ENGINE if behavior else None, proximal, MASK, proximal)
    return Evidence(ratios, torch.ones_like(ENGINE), turn_ids=turns)


def k3(x: float) -> float:
    return math.exp(x) - 1 - x


def test_by_hand() -> None:
    found = finalize(by_turn(evidence()))
    expected = {
        "turns/engine_k3/0": k3(0.5),
        "turns/engine_k3/1": (k3(-0.25) + k3(0.0)) / 2,
        "turns/engine_k3/2": k3(0.125),
        "turns/engine_k3/7": k3(1.0),
        "turns/engine_k3/8_up": (k3(0.3) + k3(-0.3)) / 2,
    }
    assert found.keys() == expected.keys(), "what was not measured has no figure"
    for name, value in expected.items():
        assert found[name] == pytest.approx(value), name


def test_places_ages_and_servers_by_hand() -> None:
    one = replace(evidence(), versions=torch.tensor([[5, 5, 5, 4, 4], [4, 4, 0, -4, -4]]))
    assert finalize(by_place(one)) == pytest.approx({"places/engine_k3/1_16": sum(map(k3, SCORED)) / len(SCORED)})
    assert finalize(by_age(one, 5)) == pytest.approx(
        {
            "ages/engine_k3/0": (k3(0.5) + k3(-0.25)) / 2,
            "ages/engine_k3/1": (k3(0.0) + k3(1.0) + k3(0.125)) / 3,
            "ages/engine_k3/5": k3(0.3),
            "ages/engine_k3/8_up": k3(-0.3),
        }
    )
    by_row = {0: sum(map(k3, SCORED[:4])) / 4, 1: sum(map(k3, SCORED[4:])) / 3}
    assert finalize(by_server(one, (2, 16))) == pytest.approx(
        {"servers/engine_k3/2": by_row[0], "servers/engine_k3/16_up": by_row[1]}
    )
    assert finalize(by_server(one, (-1, 0))) == pytest.approx({"servers/engine_k3/0": by_row[1]})


def test_parts_add_up_to_the_whole_and_have_the_same_names() -> None:
    whole = by_turn(evidence())
    rows = [
        by_turn(
            Evidence(
                LogRatios(torch.zeros(1, 5), ENGINE[i : i + 1], ENGINE[i : i + 1], MASK[i : i + 1], ENGINE[i : i + 1]),
                torch.ones(1, 5),
                turn_ids=TURNS[i : i + 1],
            )
        )
        for i in range(2)
    ]
    assert rows[0].keys() == rows[1].keys() == whole.keys()
    assert finalize(add(rows)) == pytest.approx(finalize(whole))


@pytest.mark.parametrize("lag", [0.0, 0.25])
def test_of_stale_samples_it_is_what_is_known(lag: float) -> None:
    """With the weights that sampled, the engine's part alone; without them both parts under another name."""
    known, merged = finalize(by_turn(evidence(lag=lag))), finalize(by_turn(evidence(behavior=False, lag=lag)))
    assert known["turns/engine_k3/0"] == pytest.approx(k3(0.5))
    assert merged["turns/merged_k3/0"] == pytest.approx(k3(0.5 + lag))
    assert not [name for name in merged if "engine" in name]


def test_where_turns_are_not_known_there_is_nothing() -> None:
    assert by_turn(evidence(turns=None)) == {}
