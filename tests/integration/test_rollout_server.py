"""A real SGLang server: its records agree with Hugging Face on the same tokens, and only a proved push is accepted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_trm.config.schema import Config
from moe_trm.errors import EngineError, RecordRejected, SyncError
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.sglang.backend import SglangBackend
from moe_trm.rollout.sglang.disk_load import load_folder, verified_checksums
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.rollout.sglang.request import generate_request
from moe_trm.rollout.single_turn import SingleTurn
from moe_trm.rollout.teacher import TaughtSampler
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams
from tests.integration.served import (
    EXPERT,
    EXPERT_FUSED,
    PARAMS,
    VOCAB,
    check_against_hf,
    load,
    make_push,
    prompts,
    sample,
    with_engine,
)


def test_sixty_four_requests_at_once_agree_with_hf(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 0))
    started = time.perf_counter()
    records = sample(served_config, rollout_server, prompts(64))
    print(f"64 requests, {sum(record.num_sampled for record in records)} tokens: {time.perf_counter() - started:.2f} s")
    assert {record.sample_id for record in records} == set(range(64))
    for record in records:
        assert record.versions.tolist() == [0] * record.num_sampled
    for record in records[:4]:
        check_against_hf(record, tiny_moe)


def test_as_a_teacher_it_gives_the_log_probs_of_what_it_sampled_itself(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    """By one prefill what decoding gave token by token, at temperature 1 over the whole vocabulary."""
    load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 0))
    params = SamplingParams(temperature=1.0, top_k=VOCAB, max_new_tokens=24)

    async def work(engine: ServerEngine) -> list[RolloutRecord]:
        class Engine(SingleTurn):
            async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
                return await engine.generate(prompt, params, sample_id=sample_id, group_id=group_id)

            def __init__(self) -> None:
                pass

        teacher = EngineHttp(rollout_server.url, rollout_server.api_key, timeout_s=60.0, max_attempts=1)
        sampler = TaughtSampler(Engine(), [teacher], SglangBackend())
        made = (sampler.sample(prompt, sample_id=i, group_id=i) for i, prompt in enumerate(prompts(8)))
        try:
            found = list(await asyncio.gather(*made))
        finally:
            await sampler.close()
        assert sampler.metrics()["teacher/repeat_abs_diff"] < 1e-4
        return found

    for record in with_engine(served_config, rollout_server, work):
        assert record.teacher_logprobs is not None
        np.testing.assert_allclose(record.teacher_logprobs, record.full_logprobs, atol=1e-4)


def test_a_push_succeeds_while_the_engine_generates_for_others(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    """A client that hung up, like a health check that gave up, leaves a request that keeps the engine busy."""
    (prompt,) = prompts(1)

    async def hang_up(engine: ServerEngine) -> None:
        long = replace(PARAMS, max_new_tokens=1500)
        request = {**generate_request(engine.question(prompt.token_ids, long, bare=True)), "stream": True}
        key = {"Authorization": f"Bearer {rollout_server.api_key}"}
        async with (
            aiohttp.ClientSession(headers=key) as session,
            session.post(f"{rollout_server.url}/generate", json=request) as response,
        ):
            await response.content.readline()

    async def work(engine: ServerEngine) -> list[RolloutRecord]:
        records = []
        for version in range(20, 23):
            push = make_push(tmp_path, tiny_moe, version)
            await hang_up(engine)
            await engine.load_weights(push)
            records.append(await engine.generate(prompt, PARAMS, sample_id=version, group_id=version))
        return records

    records = with_engine(served_config, rollout_server, work)
    assert [set(record.versions.tolist()) for record in records] == [{20}, {21}, {22}]


def test_an_engine_that_lent_its_memory_serves_the_next_push_as_before(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    """The steps of a colocated run against the server's own interface.

    On CPU nothing is freed, so only the effect of the steps themselves can differ.
    """
    (prompt,) = prompts(1)
    greedy = replace(PARAMS, top_p=1e-3)

    async def work(engine: ServerEngine) -> list[list[int]]:
        answers = []
        for version in (6, 7):
            await engine.load_weights(make_push(tmp_path, tiny_moe, version))
            record = await engine.generate(prompt, greedy, sample_id=0, group_id=0)
            answers.append(record.tokens.tolist())
            await engine.release_memory()
        await engine.load_weights(make_push(tmp_path, tiny_moe, 8))
        return answers

    first, second = with_engine(served_config, rollout_server, work)
    assert first == second
    assert set(sample(served_config, rollout_server, [prompt], greedy)[0].versions.tolist()) == {8}


class LoadsSomethingElse(EngineHttp):
    """The real server behind a proxy that makes it load another folder under the requested version string."""

    folder = ""

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        if path == "/update_weights_from_disk":
            body = {**body, "model_path": self.folder}
        return await super().post(path, body)


def test_one_wrong_expert_under_the_right_version_is_refused(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    push = make_push(tmp_path / "meant", tiny_moe, 5)
    make_push(tmp_path / "loaded", tiny_moe, 5)
    path = tmp_path / "loaded" / "v000005" / "model-1.safetensors"
    tensors = load_file(path)
    tensors[EXPERT][0, 0] = torch.nextafter(tensors[EXPERT][0, 0], torch.tensor(1.0))
    save_file(tensors, path, metadata={"format": "pt"})

    async def run() -> None:
        async with LoadsSomethingElse(rollout_server.url, rollout_server.api_key, timeout_s=300, max_attempts=1) as api:
            api.folder = str(tmp_path / "loaded" / "v000005")
            await load_folder(api, push, asyncio.to_thread(verified_checksums, push, EngineShape("float32")))

    with pytest.raises(SyncError) as caught:
        asyncio.run(run())
    assert caught.value.got == f"1 differ: {EXPERT_FUSED}"


def test_start_accepts_the_right_server(served_config: Config, rollout_server: Server) -> None:
    with_engine(served_config, rollout_server, lambda engine: engine.start())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", VOCAB + 1, "vocabulary size"),
        ("vocab_size", VOCAB - 1, "vocabulary size"),
        ("num_hidden_layers", 5, "route_payload|route_rows"),
        ("num_experts_per_tok", 3, "route_payload|route_rows"),
        ("architectures", ["Qwen2MoeForCausalLM"], "architecture differs"),
    ],
)
def test_start_refuses_a_server_of_another_model(
    served_config: Config, rollout_server: Server, tmp_path: Path, tiny_moe: Path, key: str, value: object, message: str
) -> None:
    config = json.loads((tiny_moe / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    changed = served_config.model_copy(
        update={"model": served_config.model.model_copy(update={"checkpoint": str(tmp_path)})}
    )
    with pytest.raises(EngineError, match=message):
        with_engine(changed, rollout_server, lambda engine: engine.start())


def test_a_wrong_key_is_refused_with_advice(served_config: Config, rollout_server: Server) -> None:
    async def run() -> None:
        engine = ServerEngine(served_config, "not the key")
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineError, match="MOE_TRM_API_KEY"):
        asyncio.run(run())


def test_greedy_answers_are_the_models(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    from transformers import Qwen3MoeForCausalLM

    load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 6))
    (prompt,) = prompts(1)
    model = Qwen3MoeForCausalLM.from_pretrained(tiny_moe, dtype=torch.float32).eval()
    tokens = list(prompt.token_ids)
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    expected = tuple(tokens[len(prompt.token_ids) :])
    stop = expected[5] if expected[5] not in expected[:5] else VOCAB - 1

    async def work(engine: ServerEngine) -> list[SampledTurn]:
        greedy = SamplingParams(top_k=1, max_new_tokens=16, stop_token_ids=(stop,))
        return [
            await engine.turn(prompt.token_ids, params, bare=True)
            for params in (greedy, replace(greedy, max_new_tokens=2))
        ]

    stopped, cut = with_engine(served_config, rollout_server, work)
    assert cut.finish_reason == "length"
    assert tuple(cut.tokens) == expected[:2]
    assert cut.routes is None
    if stop == expected[5]:
        assert stopped.finish_reason == "stop"
        assert tuple(stopped.tokens) == expected


def test_samples_of_weights_that_no_push_gave_are_refused(served_config: Config, rollout_server: Server) -> None:
    async def work(engine: ServerEngine) -> None:
        async with EngineHttp(rollout_server.url, rollout_server.api_key, timeout_s=300, max_attempts=1) as api:
            await api.post("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
        await engine.generate(prompts(1)[0], PARAMS, sample_id=0, group_id=0)

    with pytest.raises(RecordRejected) as caught:
        with_engine(served_config, rollout_server, work)
    assert caught.value.reason == "version_unknown"


@pytest.mark.long
def test_a_server_that_dies_while_starting_shows_its_error_and_no_arguments(
    rollout_config: Config, tmp_path: Path
) -> None:
    server = rollout_config.rollout.server.model_copy(update={"extra_args": ("--no-such-option",)})
    config = rollout_config.model_copy(update={"rollout": rollout_config.rollout.model_copy(update={"server": server})})
    with pytest.raises(EngineError, match="--no-such-option") as caught:
        start_server(Served.of(config), tmp_path / "rollout.log", "key")
    assert caught.value.got == "sglang serve: error: unrecognized arguments: --no-such-option"
    assert "moe-trm-server-" not in str(caught.value)
