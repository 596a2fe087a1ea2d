"""Arguments of the rollout server that a user may add, and those that would replace what a run relies on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from moe_trm.config.schema import Config
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.sglang.launch import launch_command
from moe_trm.rollout.sglang.server_flags import BREAKS, SETTINGS, refusals

MAY_DIFFER = {
    "--attention-backend",
    "--sampling-backend",
    "--cuda-graph-backend-decode",
    "--cuda-graph-backend-prefill",
    "--mem-fraction-static",
    "--max-mamba-cache-size",
    "--enable-return-routed-experts",
    "--sleep-on-idle",
    "--skip-server-warmup",
    "--disable-overlap-schedule",
    "--log-level-http",
}
"""Arguments of the launcher that change speed, rounding or the log only, or cannot be taken back."""


def config(*arguments: str, **rollout: object) -> Config:
    server = {"extra_args": arguments, "device": "cpu", "port": 7}
    return Config.model_validate({"model": {"checkpoint": "x"}, "rollout": {"server": server, **rollout}})


@pytest.mark.parametrize("argument", [*SETTINGS, *BREAKS, "--dtype=float32", "--weight-v", "--random-se=3"])
def test_what_a_run_relies_on_is_not_replaced(argument: str) -> None:
    [problem] = refusals(config("--mem-fraction-static", "0.3", argument, "1"))
    assert problem.got == argument
    assert problem.key == "rollout.server.extra_args"
    name = argument.partition("=")[0]
    assert SETTINGS.get(name, "") in problem.expected


@pytest.mark.parametrize("argument", ["--mem-fraction-static", "--weight-loader-disable-mmap", "--log-level", "0.3"])
def test_other_arguments_are_let_through(argument: str) -> None:
    assert not [*refusals(config(argument))]


def test_a_server_that_somebody_else_starts_is_not_judged_by_them() -> None:
    assert not [*refusals(config("--dtype", url="http://127.0.0.1:1"))]


def test_every_argument_of_the_launcher_is_known(tmp_path: Path) -> None:
    """A new one is either guarded, or may be replaced."""
    (tmp_path / "config.json").write_text("{}")
    command = launch_command(Served.of(config(quantization="fp8", colocate=True)), tmp_path, 7, "key.yaml")
    named = {argument for argument in command if argument.startswith("--")}
    assert named <= {*SETTINGS, *BREAKS} | MAY_DIFFER
    assert dict(pairwise(command))["--quantization"] == "fp8"
