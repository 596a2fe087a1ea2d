"""The judgement of a disturbed run: it holds, or each thing that does not is told."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.drills.async_soak import Kept, Ran, judged
from tests.drills.disturbed_servers import FAULTS, Disturber

STEP = {
    "ledger/issued": 32.0,
    "ledger/queued": 0.0,
    "ledger/in_flight": 0.0,
    "ledger/trained": 30.0,
    "ledger/rejected": 2.0,
    "ledger/dropped": 0.0,
    "rollout/age_max": 2.0,
    "engine/k3_kl": 1e-9,
}


def verdict(changes: dict[str, Any], steps: int = 2, **ran: Any) -> object:
    return judged(Ran([{}, STEP, STEP | changes], **ran), steps, eta=2)["verdict"]


def test_a_run_that_holds() -> None:
    assert verdict({}) == "holds"
    assert verdict({}, restarts=1, losses=2, deadly=2, starts=3) == "holds"


@pytest.mark.parametrize(
    ("changes", "ran", "fault"),
    [
        ({}, {"code": 1}, "ended with exit code 1"),
        ({}, {"steps": 3}, "2 of 3 steps; 32 samples were used"),
        ({"ledger/issued": 33.0}, {}, "the books do not balance"),
        ({"ledger/issued": 33.0, "ledger/queued": 1.0}, {}, "samples are left over"),
        ({"ledger/trained": 29.0, "ledger/dropped": 1.0}, {}, "31 samples were used"),
        ({"rollout/age_max": 3.0}, {}, "samples beyond eta"),
        ({"engine/k3_kl": 1e-3}, {}, "1 steps on weights of another label"),
        ({"engine/k3_kl": float("nan")}, {}, "1 steps on weights of another label"),
        ({"engine/k3_kl": None}, {}, "1 steps on weights of another label"),
        ({"records/rejected/malformed": 1.0}, {}, "answers lost"),
        ({}, {"restarts": 2, "deadly": 1}, "2 servers started again"),
        ({}, {"losses": 2, "deadly": 1}, "2 servers out of service"),
        ({}, {"unexplained": 1}, "the run ended by itself"),
    ],
)
def test_each_fault_is_told(changes: dict[str, Any], ran: dict[str, Any], fault: str) -> None:
    assert verdict(changes, **ran) == fault


@pytest.mark.parametrize(
    ("ends", "starts", "unexplained"),
    [
        (["pass"], 1, 0),
        (["os.kill(os.getpid(), 9)", "pass"], 2, 0),
        (["sys.exit('RunError: [Errno 28] No space left on device')", "pass"], 2, 0),
        (["sys.exit('EngineError: no rollout server came back')", "pass"], 1, 1),
        (["os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 11)"], 2, 1),
    ],
)
def test_a_run_goes_on_where_a_disturbance_ended_it(
    ends: list[str], starts: int, unexplained: int, tmp_path: Path
) -> None:
    room = threading.Event()
    room.set()
    (tmp_path / "ends").write_text("\n".join(ends))
    program = (
        "import os, sys; first, *rest = open(sys.argv[1]).read().splitlines(); "
        "open(sys.argv[1], 'w').write('\\n'.join(rest)); exec(first)"
    )
    kept = Kept([sys.executable, "-c", program, str(tmp_path / "ends")], os.environ, tmp_path / "log")
    assert bool(kept.run(room)) == bool(unexplained)
    assert (kept.starts, kept.unexplained) == (starts, unexplained)


@pytest.mark.long
def test_a_full_disk_has_no_room_until_it_is_over(tmp_path: Path) -> None:
    """The limit on the size of a file stands in for the end of a disk."""
    program = f"""
import resource, signal, time
from pathlib import Path
from tests.drills.disturbed_servers import Disturber
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
disturber = Disturber([], 1.0, 0, lambda: 0, [Path({str(tmp_path)!r})])
disturber._fill(Path({str(tmp_path / "filler")!r}), time.monotonic() + 0.2)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert not list(tmp_path.iterdir())


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
        disturber = Noted([type("Server", (), {"url": "u"})()], 1e-4, 3, lambda: 0, [])
        disturber.disturb()
        runs.append(disturber.faults)
        assert sum(disturber.done.values()) == 40
    assert runs[0] == runs[1]
    assert set(runs[0]) == set(FAULTS)
