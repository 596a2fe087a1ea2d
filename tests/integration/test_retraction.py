"""Requests that a real SGLang server retracts at unchanged weights: it computes their routes again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from moe_trm.config.schema import Config
from moe_trm.errors import RecordRejected
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams
from tests.integration.served import PAUSES_S, VOCAB, load, make_push, prompts, with_engine

Outcome = RolloutRecord | RecordRejected
COUNT = 12
"""Samples that are asked for at once of the server with little memory."""


async def outcomes(engine: ServerEngine, count: int, params: SamplingParams) -> list[Outcome]:
    """The record or the rejection of `count` samples that are asked for at once."""
    made = await asyncio.gather(
        *(engine.generate(prompt, params, sample_id=i, group_id=i) for i, prompt in enumerate(prompts(count))),
        return_exceptions=True,
    )
    assert all(isinstance(outcome, RolloutRecord | RecordRejected) for outcome in made), made
    return [outcome for outcome in made if isinstance(outcome, RolloutRecord | RecordRejected)]


def policy(config: Config, missing: str) -> Config:
    replay = config.replay.model_copy(update={"mode": "R3", "missing": missing})
    return config.model_copy(update={"replay": replay})


@pytest.mark.long
def test_a_sample_that_was_retracted_and_goes_on_under_the_same_weights(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    """Its versions say nothing; only the number of retractions does."""
    long = SamplingParams(temperature=0.8, top_p=0.9, top_k=VOCAB, max_new_tokens=300)
    load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 80))

    async def work(engine: ServerEngine, pause_s: float) -> list[Outcome]:
        samples = asyncio.create_task(outcomes(engine, 4, long))
        async with EngineHttp(rollout_server.url, rollout_server.api_key, timeout_s=300, max_attempts=1) as api:
            await asyncio.sleep(pause_s)
            await api.request("POST", "/pause_generation", {"mode": "retract"})
            await api.request("POST", "/continue_generation", {})
        done = await samples
        assert engine.metrics()["rollout/retracted"] >= sum(isinstance(one, RecordRejected) for one in done)
        return done

    def first(missing: str) -> list[Outcome]:
        for pause_s in PAUSES_S:
            config = policy(served_config, missing)
            done = with_engine(config, rollout_server, partial(work, pause_s=pause_s))
            if any(isinstance(one, RecordRejected) or (one.routes and one.routes.covered is not None) for one in done):
                return done
        raise AssertionError("nothing was retracted")

    rejected = [one for one in first("reject") if isinstance(one, RecordRejected)]
    assert {one.reason for one in rejected} == {"retracted"}
    for record in first("native"):
        assert isinstance(record, RolloutRecord)
        assert set(record.versions.tolist()) == {80}
        assert record.routes is not None
        if record.routes.covered is not None:
            assert record.routes.covered.tolist() == [False] * (record.num_tokens - 2) + [True]


@pytest.fixture(scope="module")
def cramped(rollout_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Config, Server]]:
    """A server in bfloat16 that admits more samples than its cache holds to their end."""
    server = rollout_config.rollout.server.model_copy(
        update={
            "dtype": "bfloat16",
            "max_total_tokens": 512,
            "max_running_requests": COUNT,
            "extra_args": ("--schedule-conservativeness", "0.01"),
        }
    )
    config = rollout_config.model_copy(update={"rollout": rollout_config.rollout.model_copy(update={"server": server})})
    running = start_server(Served.of(config), tmp_path_factory.mktemp("cramped") / "rollout.log", api_key="cramped")
    rollout = config.rollout.model_copy(update={"url": running.url})
    yield policy(config.model_copy(update={"rollout": rollout}), "native"), running
    running.stop()


def record_of(prompt: Prompt, turn: SampledTurn, *, keep_changed: bool) -> RolloutRecord:
    conversation = Conversation(prompt)
    conversation.add(turn)
    return conversation.record(sample_id=0, group_id=0, keep_changed=keep_changed)


def differing(prompt: Prompt, turn: SampledTurn, plain: SampledTurn) -> tuple[int, int]:
    """Route sets of the leading tokens that both answers have in common: how many differ, and how many there are."""
    assert turn.routes is not None
    assert plain.routes is not None
    length = min(turn.num_sampled, plain.num_sampled)
    parts = [*np.flatnonzero(turn.tokens[:length] != plain.tokens[:length]), length]
    rows = len(prompt.token_ids) + int(parts[0]) - 1
    ours, others = (np.sort(one.routes.experts[:rows], -1) for one in (turn, plain) if one.routes is not None)
    differs = (ours != others).any(-1)
    return int(differs.sum()), differs.size


@pytest.mark.slow
def test_memory_pressure_retracts_and_both_policies_treat_it(
    cramped: tuple[Config, Server], tiny_moe: Path, tmp_path: Path
) -> None:
    """The same greedy answers without and with pressure: what the second computation's routes would have hidden."""
    config, server = cramped
    greedy = SamplingParams(temperature=1.0, top_p=1e-3, top_k=VOCAB, max_new_tokens=100)
    load(config, server, make_push(tmp_path, tiny_moe, 0, "bfloat16"))
    chosen = prompts(COUNT)

    async def work(engine: ServerEngine) -> tuple[list[SampledTurn], list[SampledTurn], float]:
        plain = [await engine.turn(prompt.token_ids, greedy) for prompt in chosen]
        before = engine.metrics()["rollout/retracted"]
        assert before == 0
        # With an empty prefix cache, so that nothing is found again.
        await engine.load_weights(make_push(tmp_path, tiny_moe, 1, "bfloat16"))
        turns = await asyncio.gather(*(engine.turn(prompt.token_ids, greedy) for prompt in chosen))
        return plain, list(turns), engine.metrics()["rollout/retracted"]

    plain, turns, counted = with_engine(config, server, work)
    retracted = [turn for turn in turns if turn.retracted]
    assert len(retracted) == counted > 0
    totals = {True: np.zeros(2, int), False: np.zeros(2, int)}
    for prompt, turn, other in zip(chosen, turns, plain, strict=True):
        totals[turn.retracted] += differing(prompt, turn, other)
        kept = record_of(prompt, turn, keep_changed=True)
        assert kept.routes is not None
        if not turn.retracted:
            assert kept.routes.covered is None
            continue
        assert kept.routes.coverage().tolist() == [False] * (kept.num_tokens - 2) + [True]
        with pytest.raises(RecordRejected) as caught:
            record_of(prompt, turn, keep_changed=False)
        assert caught.value.reason == "retracted"
    for was_retracted, (differ, sets) in totals.items():
        print(f"{'retracted' if was_retracted else 'other'} answers: {differ} of {sets} route sets differ")
    print(f"retracted: {len(retracted)} of {COUNT}")
    assert totals[True][1] > 0
