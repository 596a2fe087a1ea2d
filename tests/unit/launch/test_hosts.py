"""Where a rank is, from torchrun's environment, and the way its weights take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from launch import hosts
from launch.hosts import Host
from launch.learner import build_pusher, push_folder
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
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


@pytest.mark.parametrize("mine", ["127.0.1.1", "10.9.9.1"])
def test_a_machine_whose_name_is_loopback_to_itself_asks_where_another_one_is(
    monkeypatch: pytest.MonkeyPatch, mine: str
) -> None:
    place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": mine, "RANK": "1", "LOCAL_RANK": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    asked = []

    def towards(host: str) -> str:
        asked.append(host)
        return {"127.0.1.1": "127.0.0.1", "10.9.9.1": "10.9.9.1", "10.9.9.2": "10.9.9.1"}[host]

    monkeypatch.setattr(hosts, "_address_towards", towards)
    store = HashStore()
    store.set("address-2", "10.9.9.2")
    seen = Host.here().seen_by_others(store)
    assert seen == Host(alone=False, address="10.9.9.1")
    assert asked == ([mine, "10.9.9.2"] if mine == "127.0.1.1" else [mine])


def test_every_machine_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    store = HashStore()
    Host(alone=False, address="10.9.9.2").seen_by_others(store)
    assert store.get("address-2") == b"10.9.9.2"


def test_the_interface_is_that_of_the_address() -> None:
    assert Host(alone=True, address="127.0.0.1").interface == "lo"
    with pytest.raises(ConfigError, match="no network interface"):
        _ = Host(alone=False, address="192.0.2.1").interface


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
