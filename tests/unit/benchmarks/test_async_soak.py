"""The judgement of an asynchronous soak: it holds, or each thing that does not is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.async_soak import judged
from benchmarks.disturbed_servers import FAULTS, Disturber

STEP = {
    "ledger/issued": 16.0,
    "ledger/queued": 0.0,
    "ledger/in_flight": 0.0,
    "ledger/trained": 14.0,
    "ledger/rejected": 2.0,
    "ledger/dropped": 0.0,
    "rollout/age_max": 2.0,
    "engine/k3_kl": 1e-9,
}


def verdict(changes: dict[str, Any], code: int = 0, steps: int = 2) -> object:
    return judged([{}, STEP, STEP | changes], code, steps, eta=2)["verdict"]


def test_a_run_that_holds() -> None:
    assert verdict({}) == "holds"


@pytest.mark.parametrize(
    ("changes", "code", "steps", "fault"),
    [
        ({}, 1, 2, "ended with exit code 1"),
        ({}, 0, 3, "2 of 3 steps"),
        ({"ledger/issued": 17.0}, 0, 2, "the books do not balance"),
        ({"ledger/issued": 17.0, "ledger/queued": 1.0}, 0, 2, "samples are left over"),
        ({"rollout/age_max": 3.0}, 0, 2, "samples beyond eta"),
        ({"engine/k3_kl": 1e-3}, 0, 2, "1 steps on weights that were not those of their label"),
        ({"engine/k3_kl": float("nan")}, 0, 2, "1 steps on weights that were not those of their label"),
        ({"engine/k3_kl": None}, 0, 2, "1 steps on weights that were not those of their label"),
        ({"records/rejected/malformed": 1.0}, 0, 2, "answers lost"),
    ],
)
def test_each_fault_is_told(changes: dict[str, Any], code: int, steps: int, fault: str) -> None:
    assert verdict(changes, code, steps) == fault


@dataclass
class Noted(Disturber):
    """Notes what it would have done."""

    faults: list[str] = field(default_factory=list)

    def _do(self, fault: str, server: object, seconds: float) -> None:
        self.faults.append(fault)
        if len(self.faults) == 40:
            self.end()


def test_all_disturbances_come_in_an_order_that_the_seed_fixes() -> None:
    runs = []
    for _ in range(2):
        disturber = Noted(servers=[type("Server", (), {"url": "u"})()], every_s=1e-4, seed=3)
        disturber.run()
        runs.append(disturber.faults)
        assert sum(disturber.done.values()) == 40
    assert runs[0] == runs[1]
    assert set(runs[0]) == set(FAULTS)
