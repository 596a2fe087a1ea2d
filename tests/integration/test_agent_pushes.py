"""Weights that are pushed while agents are at work on a real SGLang server: each token keeps the version it is of."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from moe_trm.config.schema import Config
from moe_trm.config.schema.agent import AgentRows
from moe_trm.rollout.agents.agent_sampler import ADAPTER, AgentSampler
from moe_trm.rollout.agents.live_session import Policy
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.server import AgentServer
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.process import Server
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.runtime.functions.host import FunctionHost
from moe_trm.tasks.build import build_task
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from tests.integration.served import PAUSES_S, make_push
from tests.integration.test_agent_sessions import with_template

AGENT = """
import asyncio
import aiohttp

async def run(base_url, api_key, prompt):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        async def say(history, word):
            history = [*history, {"role": "user", "content": word}]
            body = {"model": "policy", "messages": history}
            async with client.post(f"{base_url}/chat/completions", json=body) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
                return [*history, answer["choices"][0]["message"]]

        history = await say([], prompt.text)
        branches = await asyncio.gather(say(history, "a"), say(history, "b"))
        await say(branches[1], "and now?")
        return 1.0
"""
SESSIONS = 6
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, top_k=250, max_new_tokens=100)


def sessions(
    config: Config, server: Server, folder: Path, checkpoints: tuple[Path, Path], version: int, pause_s: float
) -> list[RolloutRecord]:
    """Samples during which the second checkpoint is pushed as `version + 1`."""
    task = build_task(config.task.model_copy(update={"eval_size": 0}), str(folder / "chat"), 0)

    async def work() -> list[RolloutRecord]:
        engine = ServerEngine(config, server.api_key)
        host = FunctionHost(f"{folder / 'agent.py'}:run", adapter=ADAPTER, key="rollout.agent", limit_s=300.0)
        policy, rows = Policy(engine, task.tokens, AnswerReader(), Limits(9, 1500)), config.agent.rows
        door = AgentServer("127.0.0.1", 0, max_body_bytes=1 << 20)
        sampler = AgentSampler(host, door, policy, task, PARAMS, keep_changed=False, rows=rows)
        try:
            await sampler.start()
            await engine.load_weights(make_push(folder, checkpoints[0], version))
            prompt = Prompt("p", (), "what is 7 + 5?")
            made = [asyncio.ensure_future(sampler.sample(prompt, sample_id=i, group_id=0)) for i in range(SESSIONS)]
            await asyncio.sleep(pause_s)
            await engine.load_weights(make_push(folder, checkpoints[1], version + 1))
            return await asyncio.gather(*made)
        finally:
            await sampler.close()
            await engine.close()

    return asyncio.run(work())


@pytest.mark.long
@pytest.mark.parametrize(("partial", "rows", "first"), [("interrupt", "trajectory", 60), ("wait", "turns", 80)])
def test_a_push_while_agents_work_leaves_each_token_its_own_version(
    partial: Literal["interrupt", "wait"],
    rows: AgentRows,
    first: int,
    served_config: Config,
    rollout_server: Server,
    tiny_moe: Path,
    other_moe: Path,
    tmp_path: Path,
) -> None:
    """Interrupted answers go on with the new weights; where a push waits, each answer is of one version."""
    pipeline = served_config.pipeline.model_copy(update={"mode": "async", "partial": partial})
    agent = served_config.agent.model_copy(update={"rows": rows})
    config = served_config.model_copy(update={"pipeline": pipeline, "agent": agent})
    (tmp_path / "agent.py").write_text(AGENT)
    with_template(tiny_moe, tmp_path / "chat")
    checkpoints = tiny_moe, other_moe
    spanning, within = list[RolloutRecord](), False
    for number, pause_s in enumerate(PAUSES_S):
        samples = sessions(config, rollout_server, tmp_path, checkpoints, first + 2 * number, pause_s)
        spanning = [one for one in samples if len({int(v) for row in one.rows for v in row.versions}) == 2]
        turns = [
            set(row.versions[row.turn_ids[row.sampled] == t].tolist())
            for one in samples
            for row in one.rows
            for t in range(3)
        ]
        within = any(len(own) == 2 for own in turns)
        if spanning and (within or partial == "wait"):
            break
    assert spanning, "no push came between two answers of a session"
    assert within == (partial == "interrupt")
    for sample in spanning[:2]:
        assert all(turn.row >= 0 for turn in sample.session)
        for row in sample.rows:
            assert (np.diff(row.versions) >= 0).all()
            check_by_version(row, checkpoints)


def check_by_version(row: RolloutRecord, checkpoints: tuple[Path, Path]) -> None:
    """Log-prob and routes of each sampled token are those of its version's weights on the tokens before it."""
    from transformers import Qwen3MoeForCausalLM

    assert row.routes is not None
    row.routes.check_tokens(row.tokens, row.origin)
    tokens, places = torch.tensor(row.tokens[None].astype(np.int64)), np.flatnonzero(row.sampled)
    for parity, checkpoint in enumerate(checkpoints):
        own = row.versions % 2 == parity
        if not own.any():
            continue
        model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        with torch.no_grad():
            output = model(tokens, output_router_logits=True)
        logprobs = torch.log_softmax(output.logits[0, places[own] - 1].float() / PARAMS.temperature, -1)
        expected = logprobs.gather(1, tokens[0, places[own]][:, None])[:, 0].numpy()
        np.testing.assert_allclose(row.full_logprobs[own], expected, atol=1e-4)
        scores = np.stack([layer.float().numpy() for layer in output.router_logits], 1)[places[own] - 1]
        best = -np.sort(-scores, -1)
        chosen = np.sort(row.routes.experts[places[own] - 1], -1)
        same = (chosen == np.sort(np.argsort(-scores, -1)[..., :2], -1)).all(-1)
        # Two engines add in another order: near ties may fall on either side.
        assert (same | (best[..., 1] - best[..., 2] < 1e-5)).all()
