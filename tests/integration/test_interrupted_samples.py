"""A push in the middle of a sample on a real SGLang server: rejected, or continued with each token's own version."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from moe_trm.config.schema import Config
from moe_trm.errors import RecordRejected
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.process import Server
from moe_trm.rollout.sglang.disk_load import load_folder, verified_checksums
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.sampling_mask.record import join, split
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import RolloutRecord, SamplingParams
from routing import token_digest
from tests.integration.served import (
    PARAMS,
    PAUSES_S,
    VOCAB,
    check_against_hf,
    load,
    make_push,
    prompts,
    with_engine,
)


def test_a_sample_that_a_push_interrupts_is_rejected(
    served_config: Config, rollout_server: Server, tiny_moe: Path, other_moe: Path, tmp_path: Path
) -> None:
    """The engine would label its early tokens with the old version and give the new weights' routes for them."""

    async def work(engine: ServerEngine, interrupting: WeightPush, pause_s: float) -> RolloutRecord:
        expected = asyncio.to_thread(verified_checksums, interrupting, EngineShape("float32"))
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

    async def work(engine: ServerEngine, old: WeightPush, new: WeightPush, pause_s: float) -> list[RolloutRecord]:
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
        sampled=np.arange(length) >= length - len(kept),
        rollout_logprobs=record.rollout_logprobs[sampled],
        full_logprobs=record.full_logprobs[sampled],
        sampling_mask=join(kept),
        routes=replace(
            record.routes, experts=record.routes.experts[rows], token_digest=token_digest(tokens, record.origin)
        ),
    )
