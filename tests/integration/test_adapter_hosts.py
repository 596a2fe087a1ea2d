"""Adapters inside the real source of their hosts.

An environment variable names a folder with each host's package. Without it the test is skipped; tests/unit/adapters has
the same calls on tensors as the host's source defines them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


def inside(host: str, module: str = "") -> dict[str, Any]:
    """The output of `tests.integration.<host>_host` or another module, run in a process by itself."""
    variable = f"MOE_TRM_{host.upper()}_SOURCE"
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} names no folder with {host}'s package")
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            f"tests.integration.{module or host}_host",
            folder,
            *([host] if module else []),
        ],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_slime_and_miles_train_on_the_corrected_loss(host: str) -> None:
    """Their own policy losses load examples/slime by their own option. One of three answers is dropped by TRM.

    miles takes Megatron's fused cross entropy, which rounds its gradient to bfloat16.
    """
    found = inside(host, "slime")
    assert found["loss"] == pytest.approx(found["expected"], abs=1e-6)
    assert found["gradient_gap"] < (1e-6 if host == "slime" else 2**-8 * found["gradient"])
    assert found["gradient"] > 0.1
    assert found["metrics"]["moe_trm/kept"] == 2.0
    assert found["routes"] == [3, 2, 2]


def test_verl_takes_our_loss_and_our_correction() -> None:
    """Our PPO clip equals its own, and so do our presets in the place of its correction."""
    found = inside("verl")
    assert found["registered"]
    assert found["loss"] < 1e-12
    assert len(found["correction"]) == 10
    assert min(found["effect"].values()) > 0.01
    assert max(found["correction"].values()) < 1e-9


def test_trl_trains_with_rules_and_routes() -> None:
    """GRPO on a tiny mixture of experts: without rules as TRL alone, with them as by hand, and every route proved."""
    found = inside("trl")
    hand = found["by_hand"]
    assert hand["loss"] == pytest.approx(hand["expected"], abs=1e-6)
    assert hand["gap"] < 1e-6 < hand["size"]
    assert hand["no_logprobs"] == pytest.approx(1 / 3)
    for name in ("loss", "grad_norm", "reward"):
        plain = [line[name] for line in found["plain"]]
        assert [line[name] for line in found["disabled"]] == pytest.approx(plain, abs=1e-6)
    for run in ("replayed", "checkpointed", "narrow", "nothing"):
        assert len(found[run]) == 4
        assert all(line["routing/applied_fraction"] == 1.0 for line in found[run])
    assert 0 < max(line["routing/local_flip_rate"] for line in found["replayed"]) < 0.1
    assert all({"merged/k3_kl", "update/kl", "acceptance/length_1_16"} <= line.keys() for line in found["replayed"])
    assert found["checkpointed"][-1]["loss"] == pytest.approx(found["uncheckpointed"][-1]["loss"], abs=1e-5)
    assert all(0 < line["correction/kept_fraction"] < 1 for line in found["narrow"])
    assert all(line["grad_norm"] == 0 == line["correction/kept_fraction"] for line in found["nothing"])
    assert found["refused"] == "rows"
