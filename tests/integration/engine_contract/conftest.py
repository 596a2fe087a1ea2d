"""The engines under the contract. vLLM has an environment of its own (`make vllm-env`), and is skipped without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_trm.errors import ConfigError
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.vllm.launch import interpreter
from tests.integration.engine_contract.subject import KEY, Subject, settings
from tests.unit.rollout.test_scripted_servers import SCRIPTED


def skip_without(engine: str) -> None:
    """Skip this test where the engine is not installed."""
    if engine == "vllm":
        try:
            interpreter()
        except ConfigError as error:
            pytest.skip(f"{error.what}: {error.fix}")


def started(engine: str, checkpoint: Path, folder: Path, **server: object) -> tuple[Subject, Server]:
    """A server of this engine, and how it is asked."""
    skip_without(engine)
    config = settings(engine, checkpoint, **server)
    running = start_server(Served.of(config), folder / "rollout.log", KEY)
    return Subject(config, running, (checkpoint, checkpoint)), running


@pytest.fixture(scope="session")
def scripted_server(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scripted")
    _, server = started(SCRIPTED, tiny_moe, folder, extra_args=["--token-s", "0.2"])
    yield server
    server.stop()


@pytest.fixture(scope="session")
def vllm_server(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    _, server = started("vllm", tiny_moe, tmp_path_factory.mktemp("vllm"), max_total_tokens=32768)
    yield server
    server.stop()


@pytest.fixture(
    params=[
        pytest.param(SCRIPTED, id="scripted"),
        pytest.param("sglang", id="sglang"),
        pytest.param("vllm", id="vllm", marks=pytest.mark.slow),
    ]
)
def subject(request: pytest.FixtureRequest, tiny_moe: Path, other_moe: Path) -> Subject:
    """Each engine in turn, on a server that other tests use too."""
    engine = request.param
    fixture = {SCRIPTED: "scripted_server", "sglang": "rollout_server", "vllm": "vllm_server"}[engine]
    return Subject(settings(engine, tiny_moe), request.getfixturevalue(fixture), (tiny_moe, other_moe))
