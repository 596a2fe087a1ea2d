"""What every engine with servers has to hold, on the script, on SGLang and on vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_trm.errors import EngineError, RecordRejected, SyncError
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.backend import Served, backend_of
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.question import Question
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.servers.use_proof import BOUNDS, ServerUnfit
from moe_trm.rollout.servers.watchdog import Watchdog
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.sync.distributed import Sender, announce
from moe_trm.sync.manifest import Share
from moe_trm.sync.rounding import Rounding
from moe_trm.types import RolloutRecord, SamplingParams
from tests.integration.engine_contract.conftest import skip_without, started
from tests.integration.engine_contract.subject import ENGINES, KEY, Subject, settings
from tests.integration.served import EXPERT, PAUSES_S, make_push, prompts, texts_of
from tests.unit.rollout.test_scripted_servers import SCRIPTED

SOAKED = 200
CONTEXT = 2048
"""Tokens that the tiny model has positions for."""
NAMES = ["scripted", "sglang", "vllm"]


def test_records_are_those_of_the_weights_that_were_pushed_last(subject: Subject, tmp_path: Path) -> None:
    """The same prompts each time, some blocks of the prefix cache long: were it not emptied, old rows would show."""
    order = ((100, 0), (101, 1), (102, 0))

    async def work(engine: ServerEngine) -> list[list[RolloutRecord]]:
        found = []
        for version, which in order:
            await subject.push(engine, tmp_path, version, which)
            asked = prompts(8, 100)
            found.append([*await subject.sample(engine, asked), *await subject.sample(engine, asked)])
        return found

    for (version, which), records in zip(order, subject.run(work), strict=True):
        assert len(records) == 16
        for record in (*records[:2], *records[-2:]):
            subject.check(record, version, which)


def test_a_later_turn_brings_the_rows_that_are_new(subject: Subject, tmp_path: Path) -> None:
    async def work(engine: ServerEngine) -> Conversation:
        await subject.push(engine, tmp_path, 105)
        conversation = Conversation(prompts(1, 100)[0])
        for text in ((5, 6, 7), (8, 9), ()):
            conversation.add(await engine.turn(conversation.tokens, subject.params, start=conversation.known_rows))
            conversation.append(text)
        return conversation

    conversation = subject.run(work)
    rows = [turn.routes.num_rows for turn in conversation.turns if turn.routes is not None]
    record = conversation.record(sample_id=0, group_id=0, keep_changed=False)
    assert sum(rows) == (record.num_tokens - 1 if subject.computes else 0)
    subject.check(record, 105, 0)


@pytest.mark.parametrize("partial", ["wait", "interrupt"])
def test_each_token_of_a_sample_that_meets_a_push_is_of_its_version(
    subject: Subject, tmp_path: Path, partial: str
) -> None:
    """It waits for the push, or goes on after it, or is refused; an engine that interrupts has some of two versions."""
    long = replace(subject.params, max_new_tokens=300)

    async def work(engine: ServerEngine, version: int, pause_s: float) -> list[RolloutRecord | BaseException]:
        await subject.push(engine, tmp_path, version, 0)
        asked = [
            asyncio.ensure_future(engine.generate(prompt, long, sample_id=i, group_id=i))
            for i, prompt in enumerate(prompts(4))
        ]
        await asyncio.sleep(pause_s)
        await subject.push(engine, tmp_path, version + 1, 1)
        return await asyncio.gather(*asked, return_exceptions=True)

    mixed = False
    for number, pause_s in enumerate(PAUSES_S if partial == "interrupt" else PAUSES_S[:2]):
        version = 110 + 2 * number
        found = subject.run(lambda engine: work(engine, version, pause_s), mode="async", partial=partial)  # noqa: B023
        assert all(isinstance(one, RolloutRecord) or _respects_versions(one) for one in found), found
        for record in found:
            if isinstance(record, RolloutRecord):
                mixed |= len(set(record.versions.tolist())) == 2
                check_versions(subject, record, version)
        if mixed:
            break
    assert mixed or partial == "wait"


def test_ranks_that_broadcast_push_their_own_tensors(subject: Subject, request: pytest.FixtureRequest) -> None:
    """Two ranks, experts apart; then a tensor that changes on its way is refused by its name."""
    receivers = subject.config.rollout.traits.broadcast_receivers
    if not receivers:
        pytest.skip("this engine takes no broadcasts")
    weights = load_file(subject.checkpoints[1] / "model.safetensors")
    ranks = [{n: t for n, t in weights.items() if (".experts." in n) == expert} for expert in (False, True)]
    senders = [Sender(f"{request.node.name}-{number}", receivers=receivers) for number in range(2)]
    rounding = Rounding("float32")
    shares = [Share(s.meeting, announce(own.items(), rounding)) for s, own in zip(senders, ranks, strict=True)]
    changed = {name: tensor + 1e-6 * (name == EXPERT) for name, tensor in ranks[1].items()}

    def broadcast(sender: Sender, sent: list[dict[str, torch.Tensor]]) -> None:
        sender.connect()
        for tensors in sent:
            sender.send(tensors.items(), rounding)

    async def work(engine: ServerEngine) -> list[RolloutRecord]:
        await engine.receive_weights(160, shares)
        records = await subject.sample(engine, prompts(2))
        with pytest.raises(SyncError, match=re.escape(EXPERT)):
            await engine.receive_weights(161, shares)
        return records

    sent = [[ranks[0], ranks[0]], [ranks[1], changed]]
    with ThreadPoolExecutor(2) as threads:
        ended = [threads.submit(broadcast, sender, own) for sender, own in zip(senders, sent, strict=True)]
        records = subject.run(work)
        for one in ended:
            one.result()
    for record in records:
        subject.check(record, 160, 1)


def _respects_versions(error: BaseException) -> bool:
    return isinstance(error, RecordRejected) and error.reason == "version_span"


def check_versions(subject: Subject, record: RolloutRecord, version: int) -> None:
    """Each token is of this version, whose weights are the first checkpoint, or of the next with those of the other."""
    assert set(record.versions.tolist()) <= {version, version + 1}
    assert (np.diff(record.versions) >= 0).all()
    if subject.computes:
        assert record.routes is not None
        record.routes.check_tokens(record.tokens, record.origin)
        for which in (0, 1):
            own = record.versions == version + which
            assert np.abs(distance(record, subject.checkpoints[which])[own]).max(initial=0) < 1e-4


def distance(record: RolloutRecord, checkpoint: Path) -> np.ndarray:
    """`[S]` log-prob of each sampled token over its kept ids, less that of Hugging Face."""
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    first = record.num_tokens - record.num_sampled
    with torch.no_grad():
        logits = model(torch.tensor(record.tokens[None].astype(np.int64))).logits[0, first - 1 : -1] / 0.8
    assert record.sampling_mask is not None
    rows = np.split(record.sampling_mask.ids.astype(np.int64), record.sampling_mask.offsets[1:-1])
    kept = torch.stack([logits[row][torch.from_numpy(ids)].logsumexp(0) for row, ids in enumerate(rows)])
    sampled = torch.tensor(record.tokens[first:].astype(np.int64))
    return record.rollout_logprobs - (logits.gather(1, sampled[:, None])[:, 0] - kept).numpy()


def test_another_key_is_refused(subject: Subject) -> None:
    async def nothing(_: ServerEngine) -> None:
        """Not reached."""

    with pytest.raises(EngineError):
        subject.run(nothing, key="another-key")


def test_a_push_that_was_damaged_on_its_way_is_refused_and_the_next_one_is_not(
    subject: Subject, tmp_path: Path
) -> None:
    async def damaged(engine: ServerEngine) -> None:
        push = make_push(tmp_path, subject.checkpoints[0], 130)
        path = Path(push.directory) / "model-1.safetensors"
        tensors = load_file(path)
        tensors[EXPERT][3, 7] += 1e-3
        save_file(tensors, path, metadata={"format": "pt"})
        await engine.load_weights(push)

    async def whole(engine: ServerEngine) -> list[RolloutRecord]:
        await subject.push(engine, tmp_path, 131, 1)
        return await subject.sample(engine, prompts(1))

    with pytest.raises(SyncError):
        subject.run(damaged)
    [record] = subject.run(whole)
    subject.check(record, 131, 1)


def test_a_push_without_tensors_is_refused(subject: Subject, tmp_path: Path) -> None:
    async def empty(engine: ServerEngine) -> None:
        push = make_push(tmp_path, subject.checkpoints[0], 140)
        for path in Path(push.directory).glob("*.safetensors*"):
            path.unlink()
        await engine.load_weights(push)

    with pytest.raises(SyncError):
        subject.run(empty)


def test_a_context_that_is_full_is_told(subject: Subject, tmp_path: Path) -> None:
    """An engine that ends the answer early without a word would have it trained as a whole one."""
    if not subject.computes:
        pytest.skip("the script has no context")

    async def work(engine: ServerEngine) -> list[RolloutRecord]:
        await subject.push(engine, tmp_path, 142)
        return await subject.sample(engine, prompts(1, CONTEXT - subject.params.max_new_tokens // 2))

    with pytest.raises((RecordRejected, EngineError)):
        subject.run(work)


def test_long_prompts_with_seeds_are_answered(subject: Subject, tmp_path: Path) -> None:
    """More of them at once than one pass of the engine holds, so it cuts them where it cuts prompts."""
    seeded = replace(subject.params, seed=7)

    async def work(engine: ServerEngine) -> list[RolloutRecord]:
        await subject.push(engine, tmp_path, 144)
        asked = prompts(8, 700)
        answers = (engine.generate(p, seeded, sample_id=i, group_id=i) for i, p in enumerate(asked))
        return list(await asyncio.gather(*answers))

    records = subject.run(work)
    assert len(records) == 8
    for record in records[:2]:
        subject.check(record, 144, 0)


def test_decoding_and_prefill_are_of_the_weights_that_were_pushed(subject: Subject, tmp_path: Path) -> None:
    """The proof by use (docs/pipeline.md), with Hugging Face in the learner's place."""
    if not subject.config.rollout.traits.scores_tokens:
        pytest.skip("this engine does not score given tokens")

    async def work(engine: ServerEngine, version: int, which: int, scored: Path) -> dict[str, float]:
        push = make_push(tmp_path, subject.checkpoints[which], version)
        await engine.load_weights(msgspec.structs.replace(push, texts=texts_of(scored)))
        return engine.metrics()

    for version, which in ((146, 0), (147, 1)):
        own = subject.checkpoints[which]
        found = subject.run(lambda engine: work(engine, version, which, own))  # noqa: B023
        assert 0 <= found["weights/decode_gap"] <= BOUNDS["float32"].decode / 4
        assert 0 <= found["weights/learner_gap"] <= BOUNDS["float32"].learner / 4
    with pytest.raises(ServerUnfit, match="wrong weights"):
        subject.run(lambda engine: work(engine, 148, 0, subject.checkpoints[1]))


def without(part: str) -> Callable[[Any], Any]:
    """A JSON value without every field of this name."""

    def pruned(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: pruned(inner) for name, inner in value.items() if name != part}
        return [pruned(inner) for inner in value] if isinstance(value, list) else value

    return pruned


def names_in(value: Any) -> set[str]:
    """Every name of a field in a JSON value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set(value if isinstance(value, dict) else ()).union(*map(names_in, inner))


def test_an_answer_that_was_cut_or_lost_a_field_is_refused(subject: Subject, tmp_path: Path) -> None:
    """A real answer, damaged in every place; what is left must be refused, or be the record that it was."""

    async def one(engine: ServerEngine) -> tuple[bytes, Question]:
        await subject.push(engine, tmp_path, 150)
        question = engine.question(prompts(1)[0].token_ids, subject.params)
        async with EngineHttp(subject.server.url, subject.server.api_key, timeout_s=300, max_attempts=1) as http:
            return await http.request("POST", backend.generate_path, backend.request(question)), question

    backend = backend_of(subject.config.rollout.engine)
    body, question = subject.run(one)
    model = ServedModel.from_checkpoint(subject.checkpoints[0])
    whole = backend.parse(body, question, model)
    for size in range(0, len(body), max(1, len(body) // 50)):
        with pytest.raises(RecordRejected):
            backend.parse(body[:size], question, model)
    refused = 0
    for name in sorted(names_in(json.loads(body))):
        try:
            turn = backend.parse(json.dumps(without(name)(json.loads(body))).encode(), question, model)
        except RecordRejected:
            refused += 1
        else:
            assert turn.tokens.tolist() == whole.tokens.tolist()
            assert turn.rollout_logprobs.tolist() == whole.rollout_logprobs.tolist()
            assert turn.versions.tolist() == whole.versions.tolist()
    assert refused >= 4


@pytest.mark.slow
def test_a_soak_of_pushes_leaves_the_last_weights(subject: Subject, tmp_path: Path) -> None:
    async def work(engine: ServerEngine) -> list[RolloutRecord]:
        for version in range(200, 200 + SOAKED):
            await subject.push(engine, tmp_path, version, version % 2)
        return await subject.sample(engine, prompts(4))

    for record in subject.run(work):
        subject.check(record, 199 + SOAKED, 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_a_server_that_is_killed_comes_back_with_its_weights(engine: str, tiny_moe: Path, tmp_path: Path) -> None:
    skip_without(engine)
    config = settings(engine, tiny_moe, max_total_tokens=8192)
    with Watchdog(Served.of(config), tmp_path / "rollout.log", KEY) as watchdog:
        first = watchdog.server
        subject = Subject(config, first, (tiny_moe, tiny_moe))

        async def work(running: ServerEngine) -> list[RolloutRecord]:
            await subject.push(running, tmp_path, 3)
            os.killpg(first.process.pid, signal.SIGKILL)
            return await subject.sample(running, prompts(8))

        records = subject.run(work)
        assert watchdog.restarts == 1
    for record in records:
        subject.check(record, 3, 0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != SCRIPTED], ids=NAMES[1:])
def test_records_of_a_server_short_of_memory_are_still_those_of_the_weights(
    engine: str, tiny_moe: Path, tmp_path: Path
) -> None:
    """The cache holds a few of the samples, so most are preempted; a sample that an engine gives up is rejected."""
    subject, server = started(engine, tiny_moe, tmp_path, max_total_tokens=CONTEXT)

    async def work(running: ServerEngine) -> list[RolloutRecord | BaseException]:
        await subject.push(running, tmp_path, 5)
        long = SamplingParams(temperature=0.8, top_p=0.9, top_k=250, max_new_tokens=120)
        asked = (running.generate(p, long, sample_id=i, group_id=i) for i, p in enumerate(prompts(48)))
        return await asyncio.gather(*asked, return_exceptions=True)

    try:
        found = subject.run(work)
    finally:
        server.stop()
    records = [record for record in found if isinstance(record, RolloutRecord)]
    assert len(records) >= 4
    assert all(isinstance(other, RolloutRecord | RecordRejected) for other in found)
    for record in records[:6]:
        subject.check(record, 5, 0)
