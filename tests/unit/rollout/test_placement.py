"""Server and learner of one machine have GPUs of their own, or share them on purpose; planner and launchers agree."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.start.places import check_gpus, check_ranks, check_server
from moe_trm.config.schema import RolloutConfig
from moe_trm.errors import ConfigError
from moe_trm.rollout.servers import process
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.placement import gpus_of, place, servers_here
from moe_trm.tools.plan.cluster import Cluster
from moe_trm.tools.plan.gpus import gpu_of
from tests.unit.rollout.test_server_process import config


def rollout(tensor_parallel: int = 1, *arguments: str, colocate: bool = False, **settings: Any) -> RolloutConfig:
    server = {"tensor_parallel": tensor_parallel, "extra_args": arguments, **settings.pop("server", {})}
    return RolloutConfig.model_validate({"server": server, "colocate": colocate, **settings})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with eight GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    return monkeypatch


def test_the_learner_has_the_first_gpus_and_each_server_others() -> None:
    placed = place(8, 2, num_servers=2, num_ranks=4)
    assert placed.servers == (range(6, 8), range(4, 6))
    assert placed.learner == range(4)


def test_gpus_are_shared_on_purpose_only() -> None:
    shared = place(8, 8, num_ranks=8, shared=True)
    assert (shared.servers, shared.learner) == ((range(8),), range(8))
    with pytest.raises(ConfigError, match=r"(?s)too few GPUs.*8 GPUs, 1 rollout server of 4 and 5.*expected: 9 GPUs"):
        place(8, 4, num_ranks=5)
    with pytest.raises(ConfigError, match=r"(?s)which share them.*expected: 9 GPUs"):
        place(8, 4, num_ranks=9, shared=True)


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ((), 4),
        (("--dp-size", "2"), 8),
        (("--data-parallel-size=2",), 8),
        (("-dp", "2", "-pp", "2"), 16),
        (("--dp", "4", "--enable-dp-attention"), 4),
        (("--nnodes", "2"), 2),
        (("--mem-fraction-static", "0.8"), 4),
    ],
)
def test_gpus_of_a_server_follow_from_its_sizes(arguments: tuple[str, ...], gpus: int) -> None:
    assert gpus_of(rollout(4, *arguments)) == gpus


def test_a_size_that_is_no_number_is_refused_and_a_cpu_has_no_gpu() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        gpus_of(rollout(4, "--dp-size", "two"))
    assert gpus_of(rollout(4, server={"device": "cpu"})) == 0


def test_servers_of_one_machine_are_told_apart_by_their_ports() -> None:
    several = rollout(urls=("http://127.0.0.1:7", "http://node2:8", "http://localhost:9"))
    assert [servers_here(several, port) for port in (7, 9)] == [(2, 0), (2, 1)]
    assert servers_here(rollout(), 7) == (1, 0)


@pytest.mark.parametrize(("tensor", "colocate"), [*product((1, 2, 4), (False, True)), (8, True)])
def test_the_planner_counts_what_the_launcher_places(tensor: int, colocate: bool, machine: pytest.MonkeyPatch) -> None:
    settings = rollout(tensor, colocate=colocate)
    _, ranks = Cluster(1, 8, gpu_of("h100"), 1).split(settings)
    placed = check_gpus(settings, 1, ranks)
    assert placed is not None
    assert ranks == len(placed.learner)
    assert colocate or not {*placed.learner} & {*placed.servers[0]}
    with pytest.raises(ConfigError, match="too few GPUs"):
        check_gpus(settings, 1, ranks + 1)


def test_neither_planner_nor_launcher_takes_too_few(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="too few GPUs"):
        Cluster(1, 8, gpu_of("h100"), 1).split(rollout(8))
    with pytest.raises(ConfigError, match="too few GPUs"):
        check_server(rollout(8, server={"port": 0}), 1)
    with pytest.raises(ConfigError, match="too few GPUs"):
        check_ranks(rollout(8), 1)
    check_ranks(rollout(8, url="http://elsewhere:7"), 8)


def test_ranks_that_see_gpus_of_their_own_do_not_count_the_servers(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    machine.setattr(torch.cuda, "device_count", lambda: 4)
    check_ranks(rollout(4), 4)
    with pytest.raises(ConfigError, match="too few GPUs"):
        check_ranks(rollout(4), 5)


@pytest.mark.parametrize(
    ("named", "colocate", "told"), [("", False, "6,7"), ("a,b,c,d,e,f,g,h", False, "g,h"), ("", True, "0,1")]
)
def test_a_server_sees_its_gpus_alone(named: str, colocate: bool, told: str, machine: pytest.MonkeyPatch) -> None:
    if named:
        machine.setenv("CUDA_VISIBLE_DEVICES", named)
    settings = rollout(2, colocate=colocate)
    assert process._gpus(settings, 7) == {"CUDA_VISIBLE_DEVICES": told}
    assert process._gpus(rollout(2, server={"device": "cpu"}), 7) == {}


def test_its_environment_has_them(tmp_path: Path, pids_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_gpus", lambda *_: {"CUDA_VISIBLE_DEVICES": "6,7"})
    server = process.start_server(Served.of(config(tmp_path)), tmp_path / "rollout.log", "key")
    try:
        environment = Path(f"/proc/{server.process.pid}/environ").read_bytes().split(b"\0")
    finally:
        server.stop(grace_s=0.0)
    assert b"CUDA_VISIBLE_DEVICES=6,7" in environment
