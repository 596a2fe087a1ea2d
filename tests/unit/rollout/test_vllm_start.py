"""How a vLLM server is started, what it is refused, and how the controller checks and pushes, with scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from moe_trm.config.rules import refusals
from moe_trm.config.schema import Config
from moe_trm.errors import CheckpointError, ConfigError, EngineError, EngineLost, SyncError
from moe_trm.rollout.servers.backend import Delivery, Requirements, Served, backend_of
from moe_trm.rollout.servers.http import EngineHttp, HttpStatusError
from moe_trm.rollout.servers.question import RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.vllm import launch
from moe_trm.rollout.vllm.client import PROBED, ROUTES_SINCE, VllmClient
from moe_trm.rollout.vllm.launch import interpreter
from moe_trm.rollout.vllm.rules import OURS
from moe_trm.sync.disk import finish_push, write_shard
from moe_trm.sync.manifest import WeightPush
from moe_trm.sync.rounding import Rounding
from tests.unit.rollout.test_sglang_engine import HF
from tests.unit.rollout.test_vllm_answers import good

SIZES = HF | {"max_position_embeddings": 4096}


def config(tmp_path: Path, hf: Mapping[str, Any] = SIZES, **sections: Any) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(hf))
    rollout = {"engine": "vllm", **sections.pop("rollout", {})}
    rollout["server"] = {"device": "cpu", "dtype": "float32", **rollout.get("server", {})}
    return Config.model_validate({"model": {"checkpoint": str(tmp_path)}, "rollout": rollout, **sections})


def keys(settings: Config) -> set[str]:
    return {problem.key for problem in refusals(settings)}


def command_of(settings: Config) -> list[str]:
    with backend_of("vllm").launch(Served.of(settings), 7, "a-secret", Path("scratch")) as started:
        return [*started.command]


def test_a_server_is_started_without_what_vllm_is_known_to_trip_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "interpreter", lambda: Path("/v/bin/python"))
    command = command_of(config(tmp_path, replay={"mode": "R3"}))
    # `vllm serve` looks for metadata of a distribution of that name.
    assert command[:4] == ["/v/bin/python", "-P", "-m", "vllm.entrypoints.openai.api_server"]
    given = dict(pairwise(command))
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert given["--max-logprobs"] == "8"
    assert given["--host"] == "127.0.0.1"
    assert given["--middleware"].endswith(".Door")
    assert given["--worker-extension-cls"].endswith(".WeightLoader")
    # A seed with a part of a prompt ends the engine, so a prompt is never cut.
    assert "--no-enable-chunked-prefill" in command
    assert int(given["--max-num-batched-tokens"]) >= 4096
    assert {"--enable-scale-out", "--enable-return-routed-experts"} <= {*command}
    assert "--load-format" not in command
    random = config(tmp_path, rollout={"server": {"random_weights": True}})
    assert dict(pairwise(command_of(random)))["--load-format"] == "dummy"
    bare = config(tmp_path, replay={"mode": "none"}, probe={"every": 0})
    assert "--enable-return-routed-experts" not in command_of(bare)


def test_the_key_is_in_the_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "interpreter", lambda: Path("/v/bin/python"))
    with backend_of("vllm").launch(Served.of(config(tmp_path)), 7, "a-secret", tmp_path) as started:
        assert "a-secret" not in " ".join(started.command)
        assert started.environment["MOE_TRM_API_KEY"] == "a-secret"
        assert started.environment["VLLM_NO_USAGE_STATS"] == "1"


def test_vllm_is_looked_for_beside_this_environment(tmp_path: Path) -> None:
    prefix = tmp_path / ".venv"
    with pytest.raises(ConfigError, match="not installed") as caught:
        interpreter(str(prefix))
    assert "make vllm-env" in caught.value.fix
    (tmp_path / ".venv-vllm/lib/python3.11/site-packages/moe_trm_vllm_worker").mkdir(parents=True)
    assert interpreter(str(prefix)) == tmp_path / ".venv-vllm/bin/python"


def test_the_release_is_the_one_whose_routes_run_on_a_cpu() -> None:
    """0.28 and 0.29 refuse routes on a CPU; 0.31 and 0.32 need triton."""
    pinned = (Path(__file__).parents[3] / "requirements" / "vllm.txt").read_text()
    assert f"\nvllm-cpu=={ROUTES_SINCE}\n" in f"\n{pinned}"


def test_what_vllm_cannot_do_is_refused(tmp_path: Path) -> None:
    assert keys(config(tmp_path)) == set()
    assert "rollout.colocate" in keys(config(tmp_path, rollout={"colocate": True}))
    off: dict[str, Any] = {"sampling_mask": {"mode": "off"}, "rollout": {"top_p": 0.9}}
    assert "sampling_mask.mode" in keys(config(tmp_path, **off))
    union: dict[str, Any] = {"sampling_mask": {"mode": "keep", "violation": "union"}}
    assert "sampling_mask.violation" in keys(config(tmp_path, **union))
    assert "rollout.server.fp32_head" in keys(config(tmp_path, rollout={"server": {"fp32_head": True}}))
    for argument in OURS:
        found = keys(config(tmp_path, rollout={"server": {"extra_args": [argument, "1"]}}))
        assert found == {"rollout.server.extra_args"}


def test_checkpoints_that_it_cannot_serve_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of("vllm")
    monkeypatch.setattr("moe_trm.rollout.vllm.backend.interpreter", lambda: Path("/v/bin/python"))
    wide = config(tmp_path, SIZES | {"vocab_size": 5000}, sampling_mask={"mode": "keep"}, rollout={"top_p": 0.9})
    with pytest.raises(ConfigError, match="kept ids"):
        backend.check(Served.of(wide))
    backend.check(Served.of(config(tmp_path, SIZES | {"vocab_size": 5000}, rollout={"top_p": 0.9, "top_k": 64})))
    with pytest.raises(ConfigError, match="smaller than the longest sequence"):
        backend.check(Served.of(config(tmp_path, rollout={"server": {"max_total_tokens": 64}})))
    short = {"max_total_tokens": 64, "extra_args": ["--max-model-len=64"]}
    backend.check(Served.of(config(tmp_path, rollout={"server": short})))
    monkeypatch.setattr("moe_trm.rollout.vllm.backend.interpreter", lambda: interpreter(str(tmp_path / ".venv")))
    with pytest.raises(ConfigError, match="not installed"):
        backend.check(Served.of(config(tmp_path)))
    backend.check(Served.of(config(tmp_path, rollout={"url": "http://127.0.0.1:9"})))
    monkeypatch.setattr("moe_trm.rollout.vllm.backend.interpreter", lambda: Path("/v/bin/python"))
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    with pytest.raises(CheckpointError, match="quantised"):
        backend.check(Served.of(config(tmp_path, SIZES | {"quantization_config": fp8})))
    images = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": SIZES}
    with pytest.raises(CheckpointError, match="names of its text alone"):
        backend.check(Served.of(config(tmp_path, images)))


SERVED = {
    "engine": "vllm",
    "release": "0.30.0",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 8,
    "dtype": "float32",
    "quantization": None,
    "returns_routes": True,
    "logprobs_mode": "processed_logprobs",
    "tensor_parallel": 1,
    "version": "none",
}


class ScriptedHttp:
    """Answers in place of a server."""

    url = "http://127.0.0.1:9"

    def __init__(self, served: object = None, pushed: object = None, answer: Any = None) -> None:
        self._served, self._pushed, self._answer = served, pushed, answer
        self.asked: list[str] = []

    async def get(self, _: str) -> Any:
        return told(self._served)

    async def post(self, path: str, body: object) -> Any:
        self.asked.append(path)
        return told(self._pushed)

    async def request(self, *_: object) -> bytes:
        return json.dumps(self._answer).encode()


def told(value: object) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


MODEL = ServedModel("Qwen3MoeForCausalLM", 8, 2, (0, 1), 4, 2)
NEEDS = Requirements(MODEL, RequestedFields(True, True), 1.0, "float32", True)


def client() -> VllmClient:
    return VllmClient(NEEDS)


def probe() -> dict[str, Any]:
    """The answer to the probe at the start: one token of two kept ids, before any push."""
    answer = good() | {"weight_version": "none", "prompt_token_ids": list(PROBED)}
    [choice] = answer["choices"]
    for field in (choice["token_ids"], choice["logprobs"]["content"]):
        field.pop()
    return answer


def check(**differs: Any) -> None:
    asyncio.run(client().check(cast(EngineHttp, ScriptedHttp(SERVED | differs, answer=probe()))))


def test_log_probs_of_the_model_are_refused_before_the_first_push() -> None:
    """Where the server says that they are processed, and they are not: two kept ids do not add up to one."""
    raw = probe()
    [choice] = raw["choices"]
    for likely in choice["logprobs"]["content"][0]["top_logprobs"]:
        likely["logprob"] -= 0.5
    with pytest.raises(EngineError, match="mask_sum"):
        asyncio.run(client().check(cast(EngineHttp, ScriptedHttp(SERVED, answer=raw))))


def test_a_release_with_known_route_defects_is_refused_where_routes_are_wanted() -> None:
    check(release="0.32.1")
    with pytest.raises(EngineError, match="not those of the forwards"):
        check(release="0.26.0")
    bare = VllmClient(replace(NEEDS, requested=RequestedFields(False, True)))
    asyncio.run(bare.check(cast(EngineHttp, ScriptedHttp(SERVED | {"release": "0.26.0"}, answer=probe()))))


def test_another_server_than_the_configured_one_is_refused() -> None:
    check()
    for name, value in {
        "architectures": ["Other"],
        "vocab_size": 9,
        "dtype": "bfloat16",
        "quantization": "fp8",
        "returns_routes": False,
        "logprobs_mode": "raw_logprobs",
        "tensor_parallel": 2,
    }.items():
        with pytest.raises(EngineError, match="differs"):
            check(**{name: value})
    with pytest.raises(EngineError, match="tensor_parallel differs"):
        check(tensor_parallel=None)  # an older packages/vllm_worker does not name it
    stock = cast(EngineHttp, ScriptedHttp(HttpStatusError("no such path", got="404")))
    with pytest.raises(EngineError, match="packages/vllm_worker"):
        asyncio.run(client().check(stock))


def pushed(tmp_path: Path) -> WeightPush:
    tensors = {"a": torch.zeros(2), "b": torch.ones(2)}
    (tmp_path / "config.json").write_text("{}")
    shard = write_shard(tmp_path / "v1" / "model-0.safetensors", tensors.items(), Rounding("float32"))
    return finish_push(str(tmp_path / "v1"), shard, 1, str(tmp_path))


def load(push: WeightPush, answer: object) -> None:
    async def run() -> None:
        asked = client()
        expected = asyncio.ensure_future(asyncio.to_thread(asked.expected_digests, push))
        try:
            delivery = Delivery(push, expected, nullcontext())
            await asked.load(cast(EngineHttp, ScriptedHttp(pushed=answer)), delivery)
        finally:
            await expected

    asyncio.run(run())


def test_a_push_is_complete_when_every_worker_read_what_was_written(tmp_path: Path) -> None:
    push = pushed(tmp_path)
    digests = {entry.name: entry.digest for entry in push.tensors}
    load(push, {"version": "1", "workers": [digests, digests]})
    for workers in ([], [digests, digests | {"b": "0"}], [{"a": digests["a"]}], [digests | {"c": "0"}]):
        with pytest.raises(SyncError):
            load(push, {"version": "1", "workers": workers})
    with pytest.raises(SyncError, match="another version"):
        load(push, {"version": "2", "workers": [digests]})
    with pytest.raises(SyncError, match="did not load"):
        load(push, HttpStatusError("refused", got="no safetensors files"))
    with pytest.raises(EngineLost):
        load(push, EngineLost("gone"))


def test_the_server_is_held_before_samples_are_kept_for_it(tmp_path: Path) -> None:
    push = pushed(tmp_path)
    server = ScriptedHttp(pushed={"version": "1", "workers": []})

    @contextmanager
    def keeping() -> Iterator[None]:
        server.asked.append("keeping")
        yield
        server.asked.append("kept")

    asyncio.run(client().load(cast(EngineHttp, server), Delivery(push, None, keeping())))
    assert server.asked == ["/moe_trm/hold", "keeping", "/moe_trm/weights", "kept"]
