"""Where a rank is, from torchrun's environment, and the way its weights take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from launch.hosts import Host
from launch.learner import build_pusher, push_folder
from moe_trm.config.schema import Config
from moe_trm.rollout.access import Access
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


@pytest.mark.parametrize(("engine", "kind"), [("sglang", BroadcastPusher), ("bundle", DiskPusher)])
def test_a_recording_is_never_waited_for_by_a_broadcast(engine: str, kind: type, tmp_path: Path) -> None:
    rollout = {"engine": engine, "bundle": str(tmp_path)}
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 8, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    sync = {"method": "distributed", "dir": str(tmp_path)}
    config = Config.model_validate({"model": {"checkpoint": str(tmp_path)}, "rollout": rollout, "sync": sync})
    host = Host(alone=True, address="127.0.0.1")
    folder = push_folder(config.sync, config.rollout, tmp_path, host)
    pushes = "" if folder is None else str(folder.path)
    access = Access(attempt="", endpoint="", key="", public_key="", pushes=pushes)
    made = build_pusher(config, 0, StandInLearner(), cast(RolloutClient, None), access, host)
    assert type(made) is kind


def test_ranks_on_several_machines_push_through_the_folder_of_the_run(tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"checkpoint": "x"}})
    folder = push_folder(config.sync, config.rollout, tmp_path, Host(alone=False, address="10.0.0.1"))
    assert folder is not None
    assert folder.path.parent == tmp_path
    folder.remove()
    assert not list(tmp_path.iterdir())
