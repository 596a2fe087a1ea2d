"""Where a rank is, from torchrun's environment, and the way its weights take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from launch.hosts import Host
from launch.learner import build_pusher, remove_abandoned
from moe_trm.config.schema import Config
from moe_trm.rollout.client import RolloutClient
from moe_trm.step.push import BroadcastPusher, DiskPusher
from tests.unit.doubles import StandInLearner


def test_alone_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}):
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert Host.here() == Host(alone=True, address="127.0.0.1")


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost"])
def test_with_others_the_address_is_the_one_towards_the_first_machine(
    monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": master}.items():
        monkeypatch.setenv(name, value)
    host = Host.here()
    assert not host.alone
    assert host.address in ("127.0.0.1", "::1")


def test_pushes_of_a_killed_run_are_removed_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [f"moe-trm-{dead.pid}-run", f"moe-trm-{os.getpid()}-run", f"moe-trm-{dead.pid}-other", "moe-trm-x-run"]
    for name in names:
        (tmp_path / name).mkdir()
    remove_abandoned(tmp_path, "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


@pytest.mark.parametrize(("engine", "kind"), [("sglang", BroadcastPusher), ("bundle", DiskPusher)])
def test_a_recording_is_never_waited_for_by_a_broadcast(engine: str, kind: type, tmp_path: Path) -> None:
    rollout = {"engine": engine, "bundle": str(tmp_path)}
    config = Config.model_validate(
        {"model": {"checkpoint": "x"}, "rollout": rollout, "sync": {"method": "distributed", "dir": str(tmp_path)}}
    )
    rollouts = cast(RolloutClient, None)
    host = Host(alone=True, address="127.0.0.1")
    made = build_pusher(config, HashStore(), 0, StandInLearner(), rollouts, tmp_path, host)
    assert type(made) is kind
