"""Servers on machines of their own: the rollout server's log, and the router's refusals."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launch import router
from launch.rollout import log_name
from moe_trm.rollout.credentials import API_KEY_VARIABLE

ROUTER = "rollout.router=http://127.0.0.1:30000"
URLS = "rollout.urls=[http://127.0.0.1:30100]"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_the_log_of_a_server_for_this_machine(host: str) -> None:
    assert log_name(host) == "rollout.log"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "node7", "fe80::1"])
def test_servers_that_others_reach_write_logs_of_their_own(host: str) -> None:
    assert log_name(host) == f"rollout-{socket.gethostname()}.log"


@pytest.mark.parametrize(
    ("overrides", "key", "installed", "says"),
    [
        ([], "k", True, "no address for the router"),
        (["rollout.router=http://127.0.0.1", URLS], "k", True, "no address for the router"),
        ([ROUTER, URLS], None, True, API_KEY_VARIABLE),
        ([ROUTER, URLS], "k", False, "moe-trm[router]"),
    ],
)
def test_the_router_is_not_started_without_what_it_needs(
    overrides: list[str],
    key: str | None,
    installed: bool,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(API_KEY_VARIABLE, key)
    monkeypatch.setattr(router, "find_spec", lambda name: object() if installed else None)
    (tmp_path / "config.yaml").write_text("model: {checkpoint: unused}\n")
    assert router.main([str(tmp_path / "config.yaml"), *overrides]) == 1
    assert says in capsys.readouterr().err
