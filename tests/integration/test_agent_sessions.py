"""Agents over HTTP on a real SGLang server: several answers, a branch, siblings that share cached prefixes."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_trm.config.schema import Config
from moe_trm.rollout.agents.agent_sampler import ADAPTER, AgentSampler
from moe_trm.rollout.agents.live_session import Policy
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.server import AgentServer
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.process import Server
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.runtime.functions.host import FunctionHost
from moe_trm.tasks.build import build_task
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams
from tests.integration.served import load, make_push
from tests.integration.test_calculator import check_against_hf

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}assistant: "
AGENT = """
import asyncio
import aiohttp

async def run(base_url, api_key, prompt):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        async def say(history, **more):
            body = {"model": "policy", "messages": history, **more}
            async with client.post(f"{base_url}/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return [*history, answer["choices"][0]["message"]]

        history = await say(list(prompt.messages), max_tokens=7)
        history.append({"role": "tool", "content": "[12]"})
        # Two at once from one answer: the agent goes on with one of them.
        branches = [say([*history, {"role": "user", "content": word}], max_tokens=6) for word in ("a", "b")]
        _, history = await asyncio.gather(*branches)
        await say([*history, {"role": "user", "content": "and now?"}], max_tokens=9)
        return 1.0
"""
SESSIONS = 12
CLIENTS = """
import anthropic
import openai


async def chat(client, question, word):
    history = [{"role": "user", "content": question}]
    first = await client.chat.completions.create(model="policy", messages=history, max_completion_tokens=7)
    history += [first.choices[0].message, {"role": "user", "content": word}]
    text = ""
    async for part in await client.chat.completions.create(model="policy", messages=history, stream=True):
        text += part.choices[0].delta.content or ""
    return first.choices[0].message.content, text


async def responses(client, question, word):
    first = await client.responses.create(model="policy", input=question, max_output_tokens=7)
    asked = {"model": "policy", "input": word, "previous_response_id": first.id, "stream": True}
    # The package's own helper wants an answer that no limit has cut.
    events = [event async for event in await client.responses.create(**asked)]
    return first.output_text, events[-1].response.output_text


async def messages(client, question, word):
    history = [{"role": "user", "content": question}]
    first = await client.messages.create(model="policy", messages=history, max_tokens=7)
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": word}]
    async with client.messages.stream(model="policy", messages=history, max_tokens=12) as stream:
        second = await stream.get_final_message()
    return ["".join(block.text for block in answer.content) for answer in (first, second)]


async def run(base_url, api_key, prompt):
    if prompt.text == "messages":
        client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
    else:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    async with client:
        texts = await globals()[prompt.text](client, "what is 7 + 5?", "and now?")
    with open(prompt.extra["file"], "wb") as file:
        file.write("\\0".join(texts).encode())
    return 1.0
"""
"""An agent for each interface, by the packages that most agents use: one answer whole, then one as a stream."""
DIALECTS = ("chat", "messages", "responses")


def test_routes_and_log_probs_of_an_agents_branch_are_those_of_one_forward_over_the_whole(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    """The policy is random: half of its ids have no text at all, so that text tokenised again would be other ids."""
    load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 0))
    (tmp_path / "agent.py").write_text(AGENT)
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=250, max_new_tokens=12, stop_token_ids=(2,))

    async def work() -> tuple[list[RolloutRecord], dict[str, float]]:
        engine = ServerEngine(served_config, rollout_server.api_key)
        settings = served_config.task.model_copy(update={"eval_size": 0})
        task = build_task(settings, str(with_template(tiny_moe, tmp_path / "chat")), 0)
        host = FunctionHost(f"{tmp_path / 'agent.py'}:run", adapter=ADAPTER, key="rollout.agent", limit_s=120.0)
        policy = Policy(engine, task.tokens, AnswerReader(), Limits(9, 400))
        server = AgentServer("127.0.0.1", 0, max_body_bytes=1 << 20)
        sampler = AgentSampler(host, server, policy, task, params, keep_changed=False)
        try:
            await sampler.start()
            await engine.start()
            prompt = Prompt("p", (), "what is 7 + 5?")
            made = await asyncio.gather(*(sampler.sample(prompt, sample_id=i, group_id=0) for i in range(SESSIONS)))
            return made, sampler.metrics()
        finally:
            await sampler.close()
            await engine.close()

    records, metrics = asyncio.run(work())
    for record in records:
        assert record.turn_ids.max() == 2
        assert record.reward == 1.0
        check_against_hf(record, tiny_moe, params)
    assert any((record.tokens[record.sampled] >= 100).any() for record in records)
    assert metrics["agent/requests"] == 4 * SESSIONS
    assert metrics["agent/continued"] == 3 * SESSIONS
    assert metrics["agent/branches"] == 2 * SESSIONS
    assert metrics["agent/cut"] == metrics["agent/rewritten"] == metrics["agent/refused"] == 0
    assert len({tuple(np.array(record.tokens).tolist()) for record in records}) > 1


@pytest.mark.long
def test_the_packages_of_openai_and_anthropic_talk_with_the_policy_on_every_interface(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    for package in ("anthropic", "openai.resources"):
        pytest.importorskip(package, reason=f"{package}, or a part of it, is missing", exc_type=ImportError)
    load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 0))
    (tmp_path / "agent.py").write_text(CLIENTS)
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=250, max_new_tokens=12, stop_token_ids=(2,))
    names = [f"{dialect}{number}" for dialect in DIALECTS for number in range(3)]

    async def work() -> list[RolloutRecord]:
        engine = ServerEngine(served_config, rollout_server.api_key)
        settings = served_config.task.model_copy(update={"eval_size": 0})
        task = build_task(settings, str(with_template(tiny_moe, tmp_path / "chat")), 0)
        host = FunctionHost(f"{tmp_path / 'agent.py'}:run", adapter=ADAPTER, key="rollout.agent", limit_s=120.0)
        policy = Policy(engine, task.tokens, AnswerReader(), Limits(9, 400))
        sampler = AgentSampler(
            host, AgentServer("127.0.0.1", 0, max_body_bytes=1 << 20), policy, task, params, keep_changed=False
        )
        try:
            await sampler.start()
            await engine.start()
            prompts = [Prompt(name, (), name[:-1], extra={"file": str(tmp_path / name)}) for name in names]
            return await asyncio.gather(
                *(sampler.sample(prompt, sample_id=place, group_id=0) for place, prompt in enumerate(prompts))
            )
        finally:
            await sampler.close()
            await engine.close()

    decode = Tokens(tiny_moe).decode_all
    for name, record in zip(names, asyncio.run(work()), strict=True):
        check_against_hf(record, tiny_moe, params)
        assert [turn.dialect for turn in record.session] == [name[:-1]] * 2
        answers = [record.tokens[record.sampled & (record.turn_ids == turn)].tolist() for turn in range(2)]
        texts = [decode(ids[:-1] if ids[-1] == 2 else ids) for ids in answers]
        assert (tmp_path / name).read_bytes().decode().split("\0") == texts


def test_a_stop_text_of_several_tokens_ends_an_answer_where_it_is_complete(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    """The likeliest tokens are always the same, so what they say is known before it is a stop text."""
    load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 0))
    decode = Tokens(tiny_moe).decode_all
    greedy = SamplingParams(temperature=1.0, top_k=1, max_new_tokens=24, stop_token_ids=(2,))

    async def work() -> list[tuple[str, SampledTurn, SampledTurn]]:
        """A text of two tokens, the answer that has it, and the answer with it as a stop text."""
        engine = ServerEngine(served_config, rollout_server.api_key)
        try:
            await engine.start()
            contexts = [tuple(range(first, first + 20)) for first in range(10, 70, 4)]
            answers = await asyncio.gather(*(engine.turn(context, greedy) for context in contexts))
            found = []
            for context, whole in zip(contexts, answers, strict=True):
                ids = whole.tokens.tolist()
                # Half of this policy's ids have no text.
                texts = [text for end in range(3, len(ids)) if len(text := decode(ids[end - 2 : end])) == 2]
                if texts:
                    params = replace(greedy, stop_texts=("never said", texts[-1]))
                    found.append((texts[-1], whole, await engine.turn(context, params)))
            return found
        finally:
            await engine.close()

    found = asyncio.run(work())
    assert found, "the policy said nothing that has a text"
    for text, whole, stopped in found:
        ids = stopped.tokens.tolist()
        assert stopped.finish_reason == "stop"
        assert ids == whole.tokens.tolist()[: len(ids)]
        assert text in decode(ids)
        assert text not in decode(ids[:-1])
        assert stopped.routes is not None
        assert stopped.routes.num_rows == 20 + len(ids) - 1


def with_template(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint's folder without weights, with a chat template."""
    folder.mkdir()
    for path in checkpoint.glob("*.json"):
        shutil.copy(path, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    return folder
