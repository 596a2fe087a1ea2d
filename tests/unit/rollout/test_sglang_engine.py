"""The client against small HTTP servers: unreachable, retried, refused, slow; and what a request asks for."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from launch.job import free_port
from moe_trm.config.choices import settle
from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError, EngineError, SyncError
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.http import EngineHttp, HttpStatusError
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.request import generate_request
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import SamplingParams
from tests.unit.rollout.local_app import LocalApp, listening

HF = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 8,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}


def config(tmp_path: Path, hf: dict[str, Any] = HF, **sections: Any) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(hf))
    server = {"startup_timeout_s": 0.1}
    rollout = {"url": "http://127.0.0.1:9", "max_attempts": 2, "timeout_s": 0.5, "server": server}
    return Config.model_validate({"model": {"checkpoint": str(tmp_path)}, "rollout": rollout, **sections})


def ask(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], attempts: int = 3) -> Any:
    """The answer to one POST from a server that runs `handler`."""

    async def run() -> Any:
        async with (
            listening(web.post("/x", handler)) as url,
            EngineHttp(url, "k", timeout_s=0.5, max_attempts=attempts) as http,
        ):
            return await http.post("/x", {})

    return asyncio.run(run())


def test_an_unreachable_server_is_named_with_advice(tmp_path: Path) -> None:
    async def run() -> None:
        engine = ServerEngine(config(tmp_path), "key")
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineError, match="not reachable") as caught:
        asyncio.run(run())
    assert "http://127.0.0.1:9" in str(caught.value)
    assert "for 0.1 s" in str(caught.value)
    assert "launch.rollout" in caught.value.fix
    assert "startup_timeout_s" in caught.value.fix


def test_a_server_that_takes_no_connection_yet_is_waited_for(tmp_path: Path) -> None:
    """It listens only after it was asked, and is then found to serve another model."""
    seen: list[str] = []

    async def health(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response({"architectures": ["Other"]})

    async def run() -> None:
        port = free_port()
        rollout = {"url": f"http://127.0.0.1:{port}", "max_attempts": 1, "timeout_s": 30.0}
        engine = ServerEngine(config(tmp_path, rollout=rollout), None)
        starting = asyncio.create_task(engine.start())
        try:
            await asyncio.sleep(0.2)
            assert not starting.done()
            async with listening(web.get("/{name}", health), port=port):
                await starting
        finally:
            await engine.close()

    with pytest.raises(EngineError, match="architecture"):
        asyncio.run(run())
    assert seen == ["/health", "/model_info"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_server_errors_are_retried_and_the_key_is_sent(status: int) -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.json_response({"ok": 1}) if len(seen) == 3 else web.Response(status=status)

    assert ask(handler) == {"ok": 1}
    assert seen == ["Bearer k"] * 3


def test_dropped_connections_are_retried_a_bounded_number_of_times() -> None:
    seen: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(1)
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    with pytest.raises(EngineError, match="2 attempts"):
        ask(handler, attempts=2)
    assert len(seen) == 2


def test_refusals_and_slowness_are_not_retried() -> None:
    seen: list[int] = []

    async def refuse(request: web.Request) -> web.Response:
        seen.append(1)
        return web.Response(status=401, text="no")

    async def sleep(request: web.Request) -> web.Response:
        seen.append(1)
        await asyncio.sleep(1)
        return web.Response()

    with pytest.raises(HttpStatusError, match="MOE_TRM_API_KEY") as caught:
        ask(refuse)
    assert caught.value.status == 401
    with pytest.raises(EngineError, match="did not answer in time"):
        ask(sleep)
    assert len(seen) == 2


def asked(engine: ServerEngine, params: SamplingParams) -> dict[str, object]:
    return generate_request(engine.question((1, 2), params))


def test_a_request_asks_for_exactly_what_the_configuration_needs(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=8, min_p=0.1, max_new_tokens=5, stop_token_ids=(2,))
    full = asked(ServerEngine(config(tmp_path, rollout={"top_p": 0.9}), None), params)
    assert full == {
        "input_ids": [1, 2],
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 8,
            "min_p": 0.1,
            "max_new_tokens": 5,
            "stop_token_ids": [2],
        },
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "return_routed_experts": True,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
    }
    plain = config(tmp_path, replay={"mode": "none"}, probe={"every": 0}, sampling_mask={"mode": "off"})
    stopping = asked(ServerEngine(plain, None), replace(params, stop_texts=("a.b", "\n")))
    assert stopping["sampling_params"]["stop_regex"] == ["a\\.b", "\\\n"]  # type: ignore[index]
    assert asked(ServerEngine(plain, None), params).keys() == {
        "input_ids",
        "sampling_params",
        "return_logprob",
        "return_prompt_token_ids",
    }


def probed_through(handed_on: set[str], tmp_path: Path) -> None:
    """The check of a router that hands on these fields only, in front of a server that answers what it is asked."""

    async def answer(request: web.Request) -> web.Response:
        whole = await request.json()
        body = {key: value for key, value in whole.items() if key in handed_on}
        rows = 2 - body.get("routed_experts_start_len", 0)
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "prompt_tokens": 2}
        if body.get("return_routed_experts"):
            meta["routed_experts"] = b64encode(bytes(4 * 4 * 2 * rows)).decode()
        if body.get("return_sampling_mask"):
            support = body.get("sampling_logprobs_mode") == "support"
            meta |= {"output_token_sampling_mask": [[1, 2]]}
            meta |= {"output_token_sampling_logprobs": [[-0.5, -0.9]] if support else [-0.5]}
        prompt = {"prompt_token_ids": whole["input_ids"]} if body.get("return_prompt_token_ids") else {}
        return web.json_response({"output_ids": [1], "meta_info": meta, **prompt})

    async def run() -> None:
        engine = ServerEngine(config(tmp_path, replay={"mode": "R3"}, sampling_mask={"mode": "keep"}), "k")
        try:
            async with (
                listening(web.post("/generate", answer)) as url,
                EngineHttp(url, "k", timeout_s=5.0, max_attempts=1) as http,
            ):
                await engine._client.check_router(http)
        finally:
            await engine.close()

    asyncio.run(run())


ROUTES = {"return_routed_experts", "routed_experts_start_len"}
MASKS = {"return_sampling_mask", "sampling_logprobs_mode"}
FIELDS = {"return_prompt_token_ids"} | ROUTES | MASKS


def test_a_router_that_hands_everything_on_passes(tmp_path: Path) -> None:
    probed_through(FIELDS, tmp_path)


@pytest.mark.parametrize("dropped", [*({field} for field in FIELDS), ROUTES | MASKS, FIELDS])
def test_a_router_that_drops_a_field_is_refused(dropped: set[str], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not hand on") as caught:
        probed_through(FIELDS - dropped, tmp_path)
    assert "smg" in caught.value.fix


def test_the_engine_is_told_what_auto_became(tmp_path: Path) -> None:
    """One optimizer step per fresh batch replays nothing: without a probe no routes are asked for."""

    def asked(minibatches: int, every: int) -> bool:
        sections: dict[str, Any] = {
            "learner": {"minibatches": minibatches},
            "probe": {"every": every},
            "replay": {"mode": "auto"},
        }
        engine = ServerEngine(settle(config(tmp_path, **sections))[0], None)
        return "return_routed_experts" in generate_request(engine.question((1, 2), SamplingParams()))

    assert [asked(1, 0), asked(1, 5), asked(2, 0), asked(4, 0)] == [False, True, False, True]


def test_masks_are_asked_for_where_sampling_is_truncated(tmp_path: Path) -> None:
    """Without truncation the mask of a token would be the vocabulary."""

    def asked(**sections: Any) -> bool:
        engine = ServerEngine(config(tmp_path, **sections), None)
        return "return_sampling_mask" in generate_request(engine.question((1, 2), SamplingParams()))

    assert asked() is False
    assert asked(rollout={"top_p": 0.9}) is True
    assert asked(sampling_mask={"mode": "keep"}) is True
    assert asked(rollout={"top_p": 0.9}, sampling_mask={"mode": "off"}) is False


class LoadingServer(LocalApp):
    """Keeps the order of what is asked of it; has the version of the folder that it loaded last."""

    def __init__(self, *, loads: bool = True) -> None:
        self.loads, self.served = loads, "default"
        self.calls: list[str] = []

    def routes(self) -> Sequence[web.RouteDef]:
        paths = ("pause_generation", "update_weights_from_disk", "continue_generation")
        return [*(web.post(f"/{path}", self.post) for path in paths), web.get("/model_info", self.info)]

    async def post(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        body = await request.json()
        if request.path == "/update_weights_from_disk" and self.loads:
            self.served = body["weight_version"]
        return web.json_response({"success": True})

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.served})


@pytest.mark.parametrize("loads", [True, False])
def test_a_server_has_the_version_that_it_was_made_to_load_and_no_other(loads: bool, tmp_path: Path) -> None:
    async def run() -> tuple[list[str], int | None]:
        app = LoadingServer(loads=loads)
        await app.start()
        rollout = {"url": app.url, "max_attempts": 1, "timeout_s": 5.0}
        engine = ServerEngine(config(tmp_path, rollout=rollout, sync={"verify": False}), "k")
        try:
            for version in (1, 2):
                await engine.load_weights(WeightPush(version, str(tmp_path), ()))
            return app.calls, engine._fleet.servers[0].version
        finally:
            await engine.close()
            await app.stop()

    if not loads:
        with pytest.raises(SyncError, match="another version"):
            asyncio.run(run())
        return
    calls, version = asyncio.run(run())
    assert calls == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"] * 2
    assert version == 2


def test_moe_layers_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    model = ServedModel.from_config(HF)
    assert (model.num_layers, model.moe_layer_ids, model.num_experts, model.top_k) == (4, (0, 2, 3), 4, 2)
    assert ServedModel.from_config({**HF, "decoder_sparse_step": 2, "mlp_only_layers": []}).moe_layer_ids == (1, 3)
    with pytest.raises(CheckpointError, match="cannot read"):
        ServedModel.from_checkpoint(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="damaged"):
        ServedModel.from_checkpoint(tmp_path)
