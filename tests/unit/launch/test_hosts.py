"""Where a rank is, from torchrun's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.hosts import Host
from launch.train import remove_abandoned


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
