"""Agents in a process of their own: what they make, and that one which fails costs its own sample only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from moe_trm.config.idle_settings import idle_settings
from moe_trm.config.schema import Config
from moe_trm.config.schema.agent import AgentRows
from moe_trm.config.task_rules import refusals
from moe_trm.errors import ConfigError, EngineError
from moe_trm.rollout.agents import live_session
from moe_trm.rollout.agents.agent_sampler import ADAPTER, AgentSampler
from moe_trm.rollout.agents.live_session import Policy
from moe_trm.rollout.agents.reader import AnswerReader, build_reader
from moe_trm.rollout.agents.server import AgentServer
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.runtime.functions.host import FunctionHost
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import RolloutRecord, SamplingParams
from tests.unit.rollout import moods
from tests.unit.rollout.agents import parsers
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.templates import tokens_of
from tests.unit.rollout.moods import Outcomes, lost, reasons, together
from tests.unit.sections import sections_of

TOKENS = tokens_of("chatml")
PARAMS = SamplingParams(temperature=0.8, top_k=400, max_new_tokens=40, stop_token_ids=TOKENS.stop_token_ids)
AGENT = """
import asyncio, os, time
import aiohttp
from moe_trm.rollout.agents.agent import AgentPrompt

async def run(base_url, api_key, prompt: AgentPrompt):
    mood, history = prompt.extra["mood"], list(prompt.messages)
    print("what an agent prints does no harm")
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        async def say(**more):
            body = {"model": "policy", "messages": history, **more}
            async with client.post(f"{base_url}/chat/completions", json=body) as response:
                answer = await response.json()
                if response.status != 200:
                    raise RuntimeError(answer["error"]["message"])
                history.append(answer["choices"][0]["message"])
                return history[-1]["content"]

        if mood == "never asks":
            return None
        await say()
        history.append({"role": "user", "content": "go on"})
        match mood:
            case "raises": raise KeyError("no such tool")
            case "waits": await asyncio.sleep(1000)
            case "blocks": time.sleep(1000)
            case "crashes": os._exit(3)
            case "returns text": return "good"
            case "returns nan": return float("nan")
            case "rewards": return {"tool": 2, "style": 0.5}
            case "goes on":
                while True:
                    await say()
                    history.append({"role": "user", "content": "more"})
            case "catches":
                try:
                    while True: await say()
                except RuntimeError:
                    return 7.0
            case "floods":
                while True:
                    try: await say(n=2)
                    except RuntimeError: pass
            case "forgets":
                del history[:2]
        await say(temperature=0.1)
"""
REASONS = {
    "never asks": "empty_output",
    "raises": "rollout_error",
    "waits": "rollout_timeout",
    "blocks": "rollout_timeout",
    "crashes": "rollout_crash",
    "returns text": "rollout_type",
    "returns nan": "rollout_nan",
    "floods": "rollout_flood",
}


class MoodTask(moods.MoodTask):
    tokens: Tokens = TOKENS


def speak(context: Sequence[int]) -> list[int]:
    """Answers that differ, in ids that the tokenizer would not choose."""
    return [
        *(token for letter in f"answer {len(context)}" for token in TOKENS.encode_plain(letter)),
        *TOKENS.stop_token_ids,
    ]


def sampler(
    folder: Path,
    engine: SpeakingEngine,
    task: MoodTask,
    *,
    turns: int = 4,
    seconds: float = 5.0,
    rows: AgentRows = "last",
    agent: str = AGENT,
) -> AgentSampler:
    path = folder / "own_agent.py"
    path.write_text(agent)
    host = FunctionHost(f"{path}:run", adapter=ADAPTER, key="rollout.agent", limit_s=seconds)
    server = AgentServer("127.0.0.1", 0, max_body_bytes=1 << 20)
    policy = Policy(engine, TOKENS, AnswerReader(), Limits(turns, 1000))
    return AgentSampler(host, server, policy, task, PARAMS, keep_changed=False, rows=rows)


def outcomes(
    folder: Path, names: Sequence[str], engine: SpeakingEngine | None = None, task: MoodTask | None = None
) -> tuple[Outcomes, Mapping[str, float]]:
    return together(sampler(folder, engine or SpeakingEngine(speak), task or MoodTask()), names)


def test_each_way_to_fail_rejects_its_own_sample_under_its_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_session, "MAX_REFUSED", 20)
    task = MoodTask()
    found, metrics = outcomes(tmp_path, ["plays", *REASONS, "plays again"], task=task)
    assert reasons(found) == REASONS
    for mood in ("plays", "plays again"):
        record = found[mood]
        assert isinstance(record, RolloutRecord)
        assert (record.prompt_id, record.reward, record.finish_reason) == (mood, 2.0, "stop")
        assert record.turn_ids.max() == 1
        text = TOKENS.decode_all(record.tokens.tolist())
        assert text.startswith(f"<|im_start|>user\nbe {mood}<|im_end|>\n<|im_start|>assistant\nanswer ")
        assert text.count("go on<|im_end|>") == 1
    assert task.seen[0].completion.startswith("answer ")
    assert task.seen[0].transcript.startswith("answer ")
    assert metrics["agent/sessions"] == 2 + len(REASONS)
    assert metrics["agent/refused"] > 20
    assert metrics["agent/overridden"] == 2
    assert metrics["agent/cut"] == 0


def test_an_agent_may_give_the_reward_itself(tmp_path: Path) -> None:
    record = outcomes(tmp_path, ["rewards"])[0]["rewards"]
    assert isinstance(record, RolloutRecord)
    assert record.reward == 2 + 4 * 0.5
    assert record.reward_parts == {"tool": 2.0, "style": 0.5}


def test_a_sample_that_a_limit_ends_is_kept_as_unfinished(tmp_path: Path) -> None:
    found, metrics = outcomes(tmp_path, ["goes on", "catches"])
    for record in found.values():
        assert isinstance(record, RolloutRecord)
        assert record.finish_reason == "length"
        assert record.turn_ids.max() == 3
    rewards = [record.reward for record in found.values() if isinstance(record, RolloutRecord)]
    assert rewards == [4.0, 7.0]
    assert metrics["agent/requests"] == 8
    assert metrics["agent/continued"] == 6
    assert metrics["agent/refused"] == 2


def test_the_branch_of_the_last_answer_is_the_sample_and_the_others_are_counted(tmp_path: Path) -> None:
    found, metrics = outcomes(tmp_path, ["forgets"])
    record = found["forgets"]
    assert isinstance(record, RolloutRecord)
    assert record.turn_ids.max() == 0
    assert TOKENS.decode_all(record.tokens.tolist()).startswith("<|im_start|>user\ngo on<|im_end|>")
    assert metrics["agent/branches"] == 2
    first = len(speak(TOKENS.encode_plain("<|im_start|>user\nbe forgets<|im_end|>\n<|im_start|>assistant\n")))
    assert metrics["agent/left_out_tokens"] == first


def test_weights_that_change_between_answers_are_those_of_each_token(tmp_path: Path) -> None:
    engine = SpeakingEngine(speak)

    def older(context: Sequence[int]) -> list[int]:
        engine.version = len(engine.asked)
        return speak(context)

    engine.speak = older
    record = outcomes(tmp_path, ["plays"], engine)[0]["plays"]
    assert isinstance(record, RolloutRecord)
    turns = record.turn_ids[record.sampled]
    assert np.array_equal(record.versions, turns + 1)


def test_a_lost_engine_stops_the_run_even_if_the_agent_would_not_mind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeakingEngine, "turn", lost)
    with pytest.raises(EngineError, match="not reachable"):
        outcomes(tmp_path, ["catches"])


def test_an_agent_that_does_not_await_is_refused_at_launch(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("def run(base_url, api_key, prompt): ...")
    host = FunctionHost(f"{path}:run", adapter=ADAPTER, key="rollout.agent", limit_s=1.0)
    with pytest.raises(ConfigError, match="async function"):
        asyncio.run(host.start())


def test_a_port_that_is_taken_is_refused_at_launch() -> None:
    async def go() -> None:
        first = AgentServer("127.0.0.1", 0, max_body_bytes=10)
        await first.start()
        try:
            port = int(first._url.rpartition(":")[2])
            with pytest.raises(ConfigError, match="cannot be used"):
                await AgentServer("127.0.0.1", port, max_body_bytes=10).start()
        finally:
            await first.close()

    asyncio.run(go())


def test_settings_of_an_agent_are_checked() -> None:
    base = Config.model_validate({"model": {"checkpoint": "unused"}})
    both = base.rollout.model_copy(update={"agent": "a.py:run", "function": "b.py:run"})
    problems = refusals(*sections_of(base.model_copy(update={"rollout": both}), "task", "rollout", "train", "eval"))
    assert "rollout.agent" in [problem.key for problem in problems]
    wrong = base.rollout.model_copy(update={"agent": "a.py"})
    assert "rollout.agent" in [
        problem.key
        for problem in refusals(
            *sections_of(base.model_copy(update={"rollout": wrong}), "task", "rollout", "train", "eval")
        )
    ]
    idle = list(idle_settings(Config.model_validate({"model": {"checkpoint": "u"}, "agent": {"port": 3}})))
    assert idle == ["agent.port has no effect: rollout.agent is not set"]


def test_parsers_are_found_by_name_or_refused() -> None:
    reader = build_reader(f"{parsers.__file__}:hermes", f"{parsers.__file__}:think")
    message = reader('<think>so</think>I <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', ({},))
    assert message["reasoning_content"] == "so"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    with pytest.raises(ConfigError, match=r"agent\.tool_parser"):
        build_reader("no_such_parser", None)
    with pytest.raises(ConfigError, match=r"agent\.reasoning_parser"):
        build_reader(None, f"{parsers.__file__}:no_such_function")
