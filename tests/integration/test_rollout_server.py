"""A real SGLang server: its records agree with Hugging Face on the same tokens, and only a proved push is accepted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_trm.config.schema import Config
from moe_trm.errors import EngineError, RecordRejected, SyncError
from moe_trm.rollout.sglang.disk_load import load_folder, verified_checksums
from moe_trm.rollout.sglang.engine import SglangEngine
from moe_trm.rollout.sglang.http import EngineHttp
from moe_trm.rollout.sglang.supervisor import Server, start_server
from moe_trm.sampling_mask.record import join, split
from moe_trm.sync.disk import finish_push, write_shard
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams
from routing import token_digest

VOCAB = 250
T = TypeVar("T")
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, top_k=VOCAB, max_new_tokens=24)
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
ROUNDING = 1e-5
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 0.2)
"""Delays tried in turn until a push comes in the middle of a sample: a busy machine is slower to its first token."""
EXPERT_FUSED = "model.layers.2.mlp.experts.w13_weight"


def with_engine(config: Config, server: Server, work: Callable[[SglangEngine], Awaitable[T]]) -> T:
    async def run() -> T:
        engine = SglangEngine(config, server.api_key)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def make_push(root: Path, checkpoint: Path, version: int, dtype: str = "float32") -> WeightPush:
    """A push of `checkpoint`'s weights in two shards, experts apart, as two ranks would write it."""
    tensors = load_file(checkpoint / "model.safetensors")
    folder = root / f"v{version:06d}"
    shards = [
        write_shard(
            folder / f"model-{number}.safetensors",
            ((name, t) for name, t in tensors.items() if (".experts." in name) == expert),
            dtype,
        )
        for number, expert in enumerate((False, True))
    ]
    return finish_push(str(folder), shards[0] + shards[1], version, str(checkpoint))


def load(config: Config, server: Server, push: WeightPush) -> None:
    with_engine(config, server, lambda engine: engine.load_weights(push))


def prompts(count: int, length: int = 20) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(f"p{i}", tuple(rng.integers(4, 99, length + i % 7).tolist())) for i in range(count)]


def sample(
    config: Config, server: Server, chosen: list[Prompt], params: SamplingParams = PARAMS
) -> list[RolloutRecord]:
    async def work(engine: SglangEngine) -> list[RolloutRecord]:
        return list(
            await asyncio.gather(
                *(engine.generate(prompt, params, sample_id=i, group_id=i) for i, prompt in enumerate(chosen))
            )
        )

    return with_engine(config, server, work)


def check_against_hf(record: RolloutRecord, checkpoint: Path) -> None:
    """Log-probs within 1e-4, masks and routes of Hugging Face's forward over the same tokens.

    An id whose place is decided by less than `ROUNDING` may be on either side: two engines add in another order.
    """
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(torch.tensor(record.tokens[None].astype(np.int64)), output_router_logits=True)
    first = record.num_tokens - record.num_sampled
    logprobs = torch.log_softmax(output.logits[0, first - 1 : -1].float() / PARAMS.temperature, -1)
    sampled = torch.tensor(record.tokens[first:].astype(np.int64))
    np.testing.assert_allclose(record.full_logprobs, logprobs.gather(1, sampled[:, None])[:, 0].numpy(), atol=1e-4)
    mask = record.sampling_mask
    assert mask is not None
    for row, kept in enumerate(np.split(mask.ids, mask.offsets[1:-1])):
        ordered, ids = logprobs[row].exp().sort(descending=True)
        mass_before = ordered.cumsum(0) - ordered
        sure, possible = (ids[mass_before <= PARAMS.top_p + sign * ROUNDING] for sign in (-1, 1))
        assert set(sure.tolist()) <= set(kept.tolist()) <= set(possible.tolist())
        log_mass = logprobs[row][torch.from_numpy(kept.astype(np.int64))].exp().sum().log().item()
        assert abs(record.rollout_logprobs[row] - (record.full_logprobs[row] - log_mass)) < 1e-4
    assert record.routes is not None
    record.routes.check_tokens(record.tokens, record.origin)
    scores = np.stack([layer.float().numpy() for layer in output.router_logits], 1)[:-1][-record.routes.num_rows :]
    ranked, best = -np.sort(-scores, -1), np.argsort(-scores, -1)[..., :2]
    same = (np.sort(record.routes.experts, -1) == np.sort(best, -1)).all(-1)
    assert (same | (ranked[..., 1] - ranked[..., 2] < ROUNDING)).all()


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


def test_a_push_changes_the_policy_and_is_proved(
    served_config: Config, rollout_server: Server, other_moe: Path, tmp_path: Path
) -> None:
    started = time.perf_counter()
    load(served_config, rollout_server, make_push(tmp_path, other_moe, 3))
    print(f"write, verify, load and prove a push: {time.perf_counter() - started:.3f} s")
    # The same prompts as before: with a prefix cache that was not flushed, routes of the old weights would come back.
    (record,) = sample(served_config, rollout_server, prompts(1))
    assert set(record.versions.tolist()) == {3}
    check_against_hf(record, other_moe)


def test_a_push_succeeds_while_the_engine_generates_for_others(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    """A client that hung up, like a health check that gave up, leaves a request that keeps the engine busy."""
    (prompt,) = prompts(1)

    async def hang_up(engine: SglangEngine) -> None:
        long = replace(PARAMS, max_new_tokens=1500)
        request = {**engine.generate_request(prompt.token_ids, long, bare=True), "stream": True}
        key = {"Authorization": f"Bearer {rollout_server.api_key}"}
        async with (
            aiohttp.ClientSession(headers=key) as session,
            session.post(f"{rollout_server.url}/generate", json=request) as response,
        ):
            await response.content.readline()

    async def work(engine: SglangEngine) -> list[RolloutRecord]:
        records = []
        for version in range(20, 23):
            push = make_push(tmp_path, tiny_moe, version)
            await hang_up(engine)
            await engine.load_weights(push)
            records.append(await engine.generate(prompt, PARAMS, sample_id=version, group_id=version))
        return records

    records = with_engine(served_config, rollout_server, work)
    assert [set(record.versions.tolist()) for record in records] == [{20}, {21}, {22}]


def test_a_file_corrupted_after_it_was_digested_is_refused(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    push = make_push(tmp_path, tiny_moe, 4)
    path = tmp_path / "v000004" / "model-1.safetensors"
    tensors = load_file(path)
    tensors[EXPERT][3, 7] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(SyncError, match=r"experts\.5\.up_proj"):
        load(served_config, rollout_server, push)


def test_an_engine_that_lent_its_memory_serves_the_next_push_as_before(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    """The steps of a colocated run against the server's own interface.

    On CPU nothing is freed, so only the effect of the steps themselves can differ.
    """
    (prompt,) = prompts(1)
    greedy = replace(PARAMS, top_p=1e-3)

    async def work(engine: SglangEngine) -> list[list[int]]:
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
            await load_folder(api, push, verified_checksums(push, "float32"))

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
        engine = SglangEngine(served_config, "not the key")
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

    async def work(engine: SglangEngine) -> list[SampledTurn]:
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
    async def work(engine: SglangEngine) -> None:
        async with EngineHttp(rollout_server.url, rollout_server.api_key, timeout_s=300, max_attempts=1) as api:
            await api.post("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
        await engine.generate(prompts(1)[0], PARAMS, sample_id=0, group_id=0)

    with pytest.raises(RecordRejected) as caught:
        with_engine(served_config, rollout_server, work)
    assert caught.value.reason == "version_unknown"


def test_a_sample_that_a_push_interrupts_is_rejected(
    served_config: Config, rollout_server: Server, tiny_moe: Path, other_moe: Path, tmp_path: Path
) -> None:
    """The engine would label its early tokens with the old version and give the new weights' routes for them."""

    async def work(engine: SglangEngine, interrupting: WeightPush, pause_s: float) -> RolloutRecord:
        expected = verified_checksums(interrupting, "float32")
        long = SamplingParams(temperature=0.8, top_p=0.9, top_k=VOCAB, max_new_tokens=600)
        sample = asyncio.create_task(engine.generate(prompts(1)[0], long, sample_id=0, group_id=0))
        async with EngineHttp(rollout_server.url, rollout_server.api_key, timeout_s=300, max_attempts=1) as api:
            await asyncio.sleep(pause_s)
            await api.request("POST", "/pause_generation", {"mode": "retract"})
            await load_folder(api, interrupting, expected)
            await api.request("POST", "/continue_generation", {})
        return await sample

    rejections: list[RecordRejected] = []
    for number, pause_s in enumerate(PAUSES_S):
        load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 20 + 2 * number))
        push = make_push(tmp_path, other_moe, 21 + 2 * number)
        try:
            with_engine(served_config, rollout_server, partial(work, interrupting=push, pause_s=pause_s))
        except RecordRejected as rejected:
            rejections.append(rejected)
            break
    (rejection,) = rejections
    assert rejection.reason == "version_span"
    assert rejection.got == f"versions [{20 + 2 * number}, {21 + 2 * number}]"


def test_what_a_push_interrupts_is_continued_and_each_token_keeps_its_version(
    served_config: Config, rollout_server: Server, tiny_moe: Path, other_moe: Path, tmp_path: Path
) -> None:
    """Log-probs, masks and routes of the tokens before the cut are of the old weights, those after it of the new."""
    pipeline = served_config.pipeline.model_copy(update={"mode": "async", "partial": "interrupt"})
    config = served_config.model_copy(update={"pipeline": pipeline})
    long = replace(PARAMS, max_new_tokens=400)

    async def work(engine: SglangEngine, old: WeightPush, new: WeightPush, pause_s: float) -> list[RolloutRecord]:
        await engine.load_weights(old)
        samples = [
            asyncio.create_task(engine.generate(prompt, long, sample_id=i, group_id=i))
            for i, prompt in enumerate(prompts(12))
        ]
        await asyncio.sleep(pause_s)
        await engine.load_weights(new)
        return list(await asyncio.gather(*samples))

    def attempt(version: int, pause_s: float) -> list[RolloutRecord]:
        old, new = make_push(tmp_path, tiny_moe, version), make_push(tmp_path, other_moe, version + 1)
        records = with_engine(config, rollout_server, lambda engine: work(engine, old, new, pause_s))
        # The others sampled the end of the sequence before the push, or began after it.
        return [record for record in records if len(set(record.versions.tolist())) == 2]

    attempts = (attempt(40 + 2 * number, pause_s) for number, pause_s in enumerate(PAUSES_S))
    spanning = next((records for records in attempts if records), [])
    assert spanning
    for record in spanning[:2]:
        version = record.versions[0]
        cut = int((record.versions == version).sum())
        assert version % 2 == 0
        assert (record.versions[:cut] == version).all()
        assert (record.versions[cut:] == version + 1).all()
        check_against_hf(first_tokens(record, cut), tiny_moe)
        check_against_hf(last_tokens(record, record.num_sampled - cut), other_moe)


def first_tokens(record: RolloutRecord, count: int) -> RolloutRecord:
    """The record as it was when `count` tokens were sampled."""
    length = record.num_tokens - record.num_sampled + count
    return cut_out(record, length, slice(0, count), slice(0, length - 1))


def last_tokens(record: RolloutRecord, count: int) -> RolloutRecord:
    """The last `count` sampled tokens, the others as their prompt, with the routes of the rows that sampled them."""
    return cut_out(record, record.num_tokens, slice(-count, None), slice(record.num_tokens - 1 - count, None))


def cut_out(record: RolloutRecord, length: int, sampled: slice, rows: slice) -> RolloutRecord:
    assert record.routes is not None
    assert record.sampling_mask is not None
    kept, tokens = split(record.sampling_mask, [1] * record.num_sampled)[sampled], record.tokens[:length]
    return replace(
        record,
        tokens=tokens,
        rollout_logprobs=record.rollout_logprobs[sampled],
        full_logprobs=record.full_logprobs[sampled],
        sampling_mask=join(kept),
        routes=replace(
            record.routes, experts=record.routes.experts[rows], token_digest=token_digest(tokens, record.origin)
        ),
    )


def test_a_server_that_dies_while_starting_shows_its_error_and_no_arguments(
    rollout_config: Config, tmp_path: Path
) -> None:
    server = rollout_config.rollout.server.model_copy(update={"extra_args": ("--no-such-option",)})
    config = rollout_config.model_copy(update={"rollout": rollout_config.rollout.model_copy(update={"server": server})})
    with pytest.raises(EngineError, match="--no-such-option") as caught:
        start_server(config, tmp_path / "rollout.log", "key")
    assert caught.value.got == "sglang serve: error: unrecognized arguments: --no-such-option"
    assert not [word for word in str(caught.value).split() if word.startswith("/tmp/moe-trm-server-")]
