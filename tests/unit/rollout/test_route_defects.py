"""Settings and releases of SGLang whose routes are wrong: refused at launch and at attach, with the source."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from moe_trm.config import InvalidConfigError, load
from moe_trm.errors import EngineError
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.sglang.route_defects import ROUTE_DEFECTS, defects_asked_for, defects_of
from tests.unit.rollout.local_app import LocalApp
from tests.unit.rollout.test_sglang_engine import HF, config

SOUND: dict[str, Any] = {
    "version": "0.5.23",
    "device": "cuda",
    "enable_return_routed_experts": True,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "pp_size": 1,
    "disable_overlap_schedule": False,
}
HARMFUL = [
    ("enable_hierarchical_cache", True, "26975"),
    ("enable_lmcache", True, "26975"),
    ("speculative_algorithm", "NGRAM", "26980"),
    ("speculative_algorithm", "NEXTN", "26980"),
    ("disaggregation_mode", "prefill", "22916"),
    ("disaggregation_mode", "decode", "22916"),
    ("pp_size", 2, "12162"),
]


def found(server: dict[str, Any]) -> list[str]:
    return [defect.setting for defect, _ in defects_of(server)]


def test_every_defect_is_tested_and_has_a_source() -> None:
    assert {setting for setting, _, _ in HARMFUL} | {"disable_overlap_schedule"} == {d.setting for d in ROUTE_DEFECTS}
    assert all("#" in defect.source for defect in ROUTE_DEFECTS)


@pytest.mark.parametrize(("setting", "value", "_source"), HARMFUL)
def test_a_harmful_setting_of_a_server_is_found_and_so_is_one_it_does_not_name(
    setting: str, value: object, _source: str
) -> None:
    assert found(SOUND) == []
    assert found(SOUND | {setting: value}) == [setting]
    assert found({name: kept for name, kept in SOUND.items() if name != setting}) == [setting]


@pytest.mark.parametrize(
    ("version", "wrong"),
    [
        ("0.5.22", True),
        ("0.5.12.post2.dev725+g2fdae94e4", True),
        ("0.5.23.dev7", True),
        ("0.5.23", False),
        ("0.5.23.post1", False),
        ("0.6.0", False),
        ("1.0", False),
        ("0.0.0.dev0", True),
        ("unknown", True),
        (None, True),
    ],
)
def test_routes_that_the_next_forward_overwrites(version: str | None, wrong: bool) -> None:
    server = SOUND | {"version": version}
    assert bool(found(server)) is wrong
    assert not found(server | {"disable_overlap_schedule": True})
    assert not found(server | {"device": "cpu"})


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["--enable-hierarchical-cache"], "enable_hierarchical_cache"),
        (["--hicache-ratio", "2", "--enable-hicache", "--mem-fraction-static", "0.3"], "enable_hierarchical_cache"),
        (["--enable-lmcache"], "enable_lmcache"),
        (["--speculative-algorithm", "NGRAM"], "speculative_algorithm"),
        (["--speculative-algorithm=EAGLE"], "speculative_algorithm"),
        (["--disaggregation-mode", "decode"], "disaggregation_mode"),
        (["--pipeline-parallel-size", "2"], "pp_size"),
        (["--pp-size=4"], "pp_size"),
    ],
)
def test_options_that_ask_for_a_defect(arguments: list[str], setting: str) -> None:
    assert [defect.setting for defect, _ in defects_asked_for(arguments)] == [setting]


def test_options_that_do_not() -> None:
    for arguments in (
        ["--disaggregation-mode", "null"],
        ["--disaggregation-mode=null", "--pp-size", "1", "--pp-size=1"],
        ["--mem-fraction-static", "0.3", "--weight-loader-disable-mmap"],
    ):
        assert not [*defects_asked_for(arguments)]


def test_a_launch_that_asks_for_one_is_refused_only_where_routes_are_wanted(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {checkpoint: start}\n")
    asked = 'rollout.server.extra_args=["--enable-hierarchical-cache"]'
    with pytest.raises(InvalidConfigError, match="26975") as caught:
        load(file, [asked])
    assert [problem.key for problem in caught.value.problems] == ["rollout.server.extra_args"]
    with pytest.raises(InvalidConfigError, match="26975"):
        load(file, [asked, "replay.mode=none", "probe.every=5"])
    load(file, [asked, "replay.mode=none", "probe.every=0"])
    load(file, [asked, "rollout.url=http://127.0.0.1:9"])


class Attached(LocalApp):
    """A healthy server with these settings; it does not generate."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info

    def routes(self) -> Sequence[web.RouteDef]:
        async def health(_: web.Request) -> web.Response:
            return web.Response()

        async def model_info(_: web.Request) -> web.Response:
            return web.json_response({"architectures": HF["architectures"]})

        async def server_info(_: web.Request) -> web.Response:
            return web.json_response(self.info)

        return [web.get("/health", health), web.get("/model_info", model_info), web.get("/server_info", server_info)]


def attach(info: dict[str, Any], tmp_path: Path, **sections: Any) -> EngineError:
    async def run() -> None:
        app = Attached(info)
        await app.start()
        rollout = {"url": app.url, "max_attempts": 1, "timeout_s": 5.0}
        engine = ServerEngine(config(tmp_path, rollout=rollout, **sections), "k")
        try:
            await engine.start()
        finally:
            await engine.close()
            await app.stop()

    with pytest.raises(EngineError) as caught:
        asyncio.run(run())
    return caught.value


@pytest.mark.parametrize(("setting", "value", "source"), [*HARMFUL, ("version", "0.5.22", "34319")])
def test_a_running_server_with_a_defect_is_refused_with_the_reason(
    setting: str, value: object, source: str, tmp_path: Path
) -> None:
    error = attach(SOUND | {setting: value}, tmp_path)
    assert f"#{source}" in error.what
    assert str(value) in str(error.got)
    # Sound settings, or no routes, come to the next check: this server says nothing of its dtype.
    assert "dtype" in attach(SOUND, tmp_path).what
    without = {"replay": {"mode": "none"}, "probe": {"every": 0}}
    assert "dtype" in attach(SOUND | {setting: value}, tmp_path, **without).what


def test_a_running_server_of_another_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    for num_ranks in (2, 8):
        error = attach(SOUND | {"dtype": "auto", "tp_size": num_ranks}, tmp_path)
        assert "another number of ranks" in error.what
        assert (error.got, error.expected) == (f"tp_size={num_ranks}", "rollout.server.tensor_parallel=1")
