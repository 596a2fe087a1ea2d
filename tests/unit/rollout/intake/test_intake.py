"""Intake processes: the records, rejections and errors of a run without them, also when processes die, hang or lag."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from moe_trm.errors import ControllerError, EngineError, RecordRejected
from moe_trm.models.tiny.checkpoint import character_tokenizer
from moe_trm.rollout.intake.messages import IntakeSettings
from moe_trm.rollout.intake.pool import IntakePool
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.question import Question, RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.backend import SglangBackend
from moe_trm.runtime import child as child_module
from moe_trm.runtime import wire
from moe_trm.runtime.shared_blocks import place_of
from moe_trm.tasks.rewards import written_text
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from tests.unit.rollout.intake.scripted_server import HF, VOCAB, ScriptedServer
from tests.unit.rollout.test_interrupted import InterruptedServer
from tests.unit.rollout.test_sglang_engine import config

T = TypeVar("T")
PATIENCE_S = 300
"""Of a test that waits for processes on a busy machine."""
PARAMS = SamplingParams(max_new_tokens=16, stop_token_ids=(2,), top_k=8)
PROMPTS = [Prompt(f"p{number}", (1, 3, number // VOCAB, number % VOCAB)) for number in range(2 * VOCAB)]


async def engine_of(tmp_path: Path, url: str, processes: int, **sections: Any) -> ServerEngine:
    rollout = {
        "url": url, "max_attempts": 1, "timeout_s": 200.0, "intake_processes": processes, **sections.pop("rollout", {}),
    }  # fmt: skip
    defaults: dict[str, Any] = {"sampling_mask": {"mode": "keep"}, "replay": {"mode": "R3"}, "sync": {"verify": False}}
    engine = ServerEngine(config(tmp_path, HF, rollout=rollout, **defaults | sections), "k")
    engine._fleet.servers[0].version = engine._fleet._version = 0
    return engine


def with_server(work: Callable[[ScriptedServer], Awaitable[T]]) -> T:
    async def run() -> T:
        server = ScriptedServer()
        await server.start()
        try:
            return await asyncio.wait_for(work(server), PATIENCE_S)
        finally:
            server.free.set()
            await server.stop()

    return asyncio.run(run())


def plain(outcome: object) -> object:
    """An outcome as data that compares: the frames of a record, or what a rejection says."""
    if isinstance(outcome, RecordRejected):
        return outcome.reason, str(outcome)
    if isinstance(outcome, BaseException):
        return type(outcome), str(outcome)
    return [bytes(frame) for frame in wire.encode(outcome)]


async def sampled(engine: ServerEngine, prompts: list[Prompt]) -> list[RolloutRecord | BaseException]:
    return await asyncio.gather(
        *(engine.generate(prompt, PARAMS, sample_id=i, group_id=i // 4) for i, prompt in enumerate(prompts)),
        return_exceptions=True,
    )


@pytest.mark.parametrize("violation", ["reject", "drop"])
def test_records_and_rejections_are_those_of_a_run_without_intakes(tmp_path: Path, violation: str) -> None:
    """Good samples, and one broken in each way among them."""

    async def outcomes(server: ScriptedServer) -> list[list[object]]:
        found = []
        for processes in (0, 2):
            engine = await engine_of(
                tmp_path, server.url, processes, sampling_mask={"mode": "keep", "violation": violation}
            )
            try:
                samples = await sampled(engine, PROMPTS)
                turns = [await engine.turn(PROMPTS[20].token_ids, PARAMS, bare=bare) for bare in (False, True)]
            finally:
                await engine.close()
            found.append([plain(outcome) for outcome in [*samples, *turns]])
            records = [sample for sample in samples if isinstance(sample, RolloutRecord)]
            assert all((place_of(record.tokens) is not None) == bool(processes) for record in records)
        return found

    without, within = with_server(outcomes)
    assert without == within
    reasons = {outcome[0] for outcome in without if isinstance(outcome, tuple)}
    expected = {"malformed", "route_rows", "route_range", "logprob_value", "aborted", "version_missing"}
    assert reasons == expected | ({"mask_violation"} if violation == "reject" else set())


@pytest.mark.parametrize(
    ("missing", "retractions"), [("reject", [0, 0, 0]), ("reject", [0, 1, 0]), ("native", [1, 0, 1])]
)
def test_a_sample_that_pushes_cut_is_the_same(tmp_path: Path, missing: str, retractions: list[int]) -> None:
    """Its first piece is not a whole sample, so the controller joins the pieces."""

    async def run(processes: int) -> tuple[object, float]:
        server = InterruptedServer([2, 3, 1], retractions)
        await server.start()
        engine = await engine_of(
            tmp_path,
            server.url,
            processes,
            pipeline={"mode": "async", "partial": "interrupt"},
            sampling_mask={"mode": "off"},
            replay={"mode": "R3", "missing": missing},
        )
        try:
            params = SamplingParams(max_new_tokens=6)
            [outcome] = await asyncio.gather(
                engine.generate(Prompt("p", (5, 6, 7)), params, sample_id=1, group_id=0), return_exceptions=True
            )
            return plain(outcome), engine.metrics()["rollout/retracted"]
        finally:
            await engine.close()
            await server.stop()

    assert asyncio.run(run(0)) == asyncio.run(run(1))


def test_errors_of_servers_reach_the_fleet_as_they_are(tmp_path: Path) -> None:
    async def work(server: ScriptedServer) -> None:
        engine = await engine_of(tmp_path, server.url, 1)
        try:
            server.refuses = 2
            records = await sampled(engine, PROMPTS[12:16])
            assert all(isinstance(record, RolloutRecord) for record in records)
            assert engine.metrics()["rollout/reissued"] == 2
            assert engine._intake is not None
            question = Question((1, 20), SamplingParams(), RequestedFields(routes=False, mask=False))
            for url, text in ((server.url + "/nowhere", "HTTP 404"), ("http://127.0.0.1:9", "not reachable")):
                with pytest.raises(EngineError, match=text):
                    await engine._intake.ask(url, question)
        finally:
            await engine.close()

    with_server(work)


def test_under_random_deaths_every_sample_comes_once_and_is_the_same(tmp_path: Path) -> None:
    chance, prompts = random.Random(0), [prompt for prompt in PROMPTS if prompt.token_ids[-1] > 11]

    async def work(server: ScriptedServer) -> None:
        engine = await engine_of(tmp_path, server.url, 0)
        expected = [plain(record) for record in await sampled(engine, prompts)]
        await engine.close()
        engine = await engine_of(tmp_path, server.url, 2)
        pool = engine._intake
        assert pool is not None
        try:
            done: list[object] = []
            for start in range(0, len(prompts), 10):
                server.free.clear()
                server.arrived.clear()
                some = asyncio.ensure_future(
                    asyncio.gather(
                        *(
                            engine.generate(prompts[i], PARAMS, sample_id=i, group_id=i // 4)
                            for i in range(start, min(start + 10, len(prompts)))
                        )
                    )
                )
                await server.arrived.wait()
                if chance.random() < 0.7:
                    os.kill(chance.choice(pool.process_ids), signal.SIGKILL)
                server.free.set()
                done += await some
            assert [plain(record) for record in done] == expected
            metrics = engine.metrics()
            assert metrics["rollout/intake_losses"] >= 1
            assert metrics["rollout/intake_reissued"] >= 1
            assert metrics["rollout/reissued"] == 0
            assert metrics["rollout/intake_bytes"] > 0
            del done, some
            while engine.metrics()["rollout/intake_bytes"]:
                await asyncio.sleep(0.05)
        finally:
            await engine.close()

    with_server(work)


def test_an_answer_that_ends_every_process_is_rejected_and_the_others_are_not(tmp_path: Path) -> None:
    async def work(server: ScriptedServer) -> None:
        engine = await engine_of(tmp_path, server.url, 1)
        pool = engine._intake
        assert pool is not None
        try:
            server.free.clear()
            ask = asyncio.ensure_future(engine.generate(PROMPTS[20], PARAMS, sample_id=0, group_id=0))
            while not ask.done():
                if pool._running and pool._running[0].child.num_open:
                    with suppress(ProcessLookupError):
                        os.kill(pool.process_ids[0], signal.SIGKILL)
                await asyncio.sleep(0.05)
            with pytest.raises(RecordRejected) as caught:
                await ask
            assert caught.value.reason == "intake_failed"
            server.free.set()
            [record] = await sampled(engine, PROMPTS[21:22])
            assert isinstance(record, RolloutRecord)
        finally:
            await engine.close()

    with_server(work)


def test_a_stopped_process_is_busy_first_and_replaced_when_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "LOOK_S", 0.05)

    async def work(server: ScriptedServer) -> None:
        monkeypatch.setattr(child_module, "SILENT_LOOKS", 10**6)
        engine = await engine_of(tmp_path, server.url, 1)
        pool = engine._intake
        assert pool is not None
        try:
            await pool.start()
            os.kill(pool.process_ids[0], signal.SIGSTOP)
            while not engine.metrics()["rollout/intakes_busy"]:
                await asyncio.sleep(0.01)
            ask = asyncio.ensure_future(sampled(engine, PROMPTS[20:21]))
            os.kill(pool.process_ids[0], signal.SIGCONT)
            [first] = await ask
            assert engine.metrics()["rollout/intake_losses"] == 0
            pool._running[0].child._detector._silent_looks = 5
            os.kill(pool.process_ids[0], signal.SIGSTOP)
            [second] = await sampled(engine, PROMPTS[20:21])
            assert plain(first) == plain(second)
            assert engine.metrics()["rollout/intake_losses"] == 1
        finally:
            await engine.close()

    with_server(work)


def test_nobody_waits_for_an_answer_that_was_given_up(tmp_path: Path) -> None:
    """A server that is fenced drops what it owes; the process closes the connection."""

    async def work(server: ScriptedServer) -> None:
        engine = await engine_of(tmp_path, server.url, 1)
        pool = engine._intake
        assert pool is not None
        try:
            server.free.clear()
            asks = [asyncio.ensure_future(sampled(engine, PROMPTS[20:24])), asyncio.ensure_future(asyncio.sleep(0))]
            await server.arrived.wait()
            asks[0].cancel()
            await asyncio.gather(*asks, return_exceptions=True)
            while pool._running[0].child.num_open:
                await asyncio.sleep(0.01)
            server.free.set()
            records = await sampled(engine, PROMPTS[20:24])
            assert all(isinstance(record, RolloutRecord) for record in records)
        finally:
            await engine.close()

    with_server(work)


def test_a_process_that_cannot_start_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    async def run() -> None:
        model = ServedModel.from_config(HF)
        pool = IntakePool(
            2, IntakeSettings(SglangBackend.answers, model, None, 1.0, 1, tokenizer=str(tmp_path / "nowhere"))
        )
        try:
            with pytest.raises(ControllerError, match="did not start") as caught:
                await pool.start()
            assert caught.value.may_pass
            with pytest.raises(ControllerError, match="did not start"):
                await pool.ask(
                    "http://127.0.0.1:9", Question((), SamplingParams(), RequestedFields(routes=False, mask=False))
                )
        finally:
            await pool.close()

    asyncio.run(run())


def test_the_text_of_a_sample_is_that_of_the_controllers_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    character_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 128, "eos_token_id": 2}))

    async def work(server: ScriptedServer) -> None:
        engine = await engine_of(tmp_path, server.url, 1)
        engine._checkpoint = str(folder)
        engine.write_text()
        tokens = Tokens(folder)
        try:
            for number, prompt in enumerate(PROMPTS[20:24]):
                record, written = await engine.generate_written(prompt, PARAMS, sample_id=number, group_id=0)
                assert written == written_text(tokens, len(prompt.token_ids), record)
                assert written[0]
        finally:
            await engine.close()

    with_server(work)
