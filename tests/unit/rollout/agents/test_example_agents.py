"""The worked examples of agents as programs, with a policy that knows its sums."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_trm.config.schema import TaskConfig
from moe_trm.methods.load import load_function
from moe_trm.models.tiny.checkpoint import make_checkpoint
from moe_trm.rollout.agents.agent_sampler import AgentSampler
from moe_trm.rollout.agents.command_host import CommandHost
from moe_trm.rollout.agents.live_session import Policy
from moe_trm.rollout.agents.reader import build_reader
from moe_trm.rollout.agents.server import AgentServer
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.tasks.build import build_task
from moe_trm.tasks.problems import ArithmeticProblem
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import RolloutRecord, SamplingParams
from tests.unit.conftest import SMALL
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine

EXAMPLES = Path(__file__).parents[4] / "examples"
SAMPLES = 3
UNREACHABLE = ("ConnectionError", "NewConnectionError", "Temporary failure", "timed out", "Name or service not known")


def knowing(tokens: Tokens) -> SpeakingEngine:
    """A policy that works every sum out, and leaves what follows an `=` to its tool."""

    def speak(context: Sequence[int]) -> list[int]:
        question, _, said = tokens.decode(context).partition("=")
        a, op, b = re.split(r"([+-])", question)
        problem = ArithmeticProblem(int(a), op, int(b))
        return [*tokens.encode_plain(f"{problem.working()}#{problem.answer}"[len(said) :]), *tokens.stop_token_ids]

    return SpeakingEngine(speak, tokens.decode_all)


def samples(
    command: Sequence[str], checkpoint: Path, tool_parser: str | None = None
) -> tuple[list[RolloutRecord], dict[str, float]]:
    """Records of a few sums, and the metrics."""

    async def go() -> tuple[list[RolloutRecord], dict[str, float]]:
        task = build_task(TaskConfig(eval_size=0), str(checkpoint), 0)
        tokens = task.tokens
        params = SamplingParams(top_k=100, max_new_tokens=24, stop_token_ids=tokens.stop_token_ids)
        policy = Policy(knowing(tokens), tokens, build_reader(tool_parser, None), Limits(8, 96))
        host = CommandHost(command, limit_s=300.0, most_at_once=2, max_output_bytes=100_000)
        server = AgentServer("127.0.0.1", 0, max_body_bytes=1 << 20)
        maker = AgentSampler(host, server, policy, task, params, keep_changed=False)
        await maker.start()
        try:
            prompts = task.train_prompts(1, SAMPLES)
            made = await asyncio.gather(
                *(maker.sample(prompt, sample_id=number, group_id=0) for number, prompt in enumerate(prompts))
            )
            return made, maker.metrics()
        finally:
            await maker.close()

    return asyncio.run(asyncio.wait_for(go(), 900))


def check(records: Sequence[RolloutRecord], metrics: dict[str, float], tokens: Tokens) -> None:
    """Every sum is right, on ids that were never tokenised twice."""
    assert [record.reward for record in records] == [1.0] * SAMPLES
    assert all(record.turn_ids.max() > 0 for record in records)
    for record in records:
        text = tokens.decode(record.tokens.tolist())
        assert record.turn_ids.max() == text.partition("=")[2].count("=")
    assert metrics["agent/requests"] == sum(int(record.turn_ids.max()) + 1 for record in records)
    assert metrics["agent/continued"] == metrics["agent/requests"] - SAMPLES
    assert metrics["agent/cut"] == metrics["agent/rewritten"] == metrics["agent/refused"] == 0


def test_the_terminal_solves_sums(tmp_path: Path) -> None:
    pytest.importorskip(
        "openai.resources", reason="the openai package, or a part of it, is missing", exc_type=ImportError
    )
    make_checkpoint(tmp_path, seed=0, shape=SMALL)
    records, metrics = samples([sys.executable, str(EXAMPLES / "terminal" / "agent.py")], tmp_path)
    check(records, metrics, Tokens(tmp_path))


@pytest.mark.slow
def test_a_framework_in_a_virtual_environment_of_its_own_solves_sums(tmp_path: Path) -> None:
    """As the README installs it, without anything of MoE-TRM beside it."""
    page = (EXAMPLES / "openai_agents" / "README.md").read_text(encoding="utf-8")
    [requirements] = re.findall(r"^pip install (.*)$", page, re.MULTILINE)
    python = fresh_environment(tmp_path / "venv", requirements.split())
    make_checkpoint(tmp_path / "plain", seed=0, shape=SMALL)
    checkpoint = tmp_path / "chat"
    load_function(f"{EXAMPLES / 'openai_agents' / 'start.py'}:write", key="test")(tmp_path / "plain", checkpoint)
    command = [str(python), str(EXAMPLES / "openai_agents" / "agent.py")]
    records, metrics = samples(command, checkpoint, f"{EXAMPLES / 'openai_agents' / 'parser.py'}:calls")
    check(records, metrics, Tokens(checkpoint))


def fresh_environment(folder: Path, requirements: Sequence[str]) -> Path:
    """The Python of a new virtual environment with `requirements`."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--retries", "1", *requirements],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and any(words in done.stderr for words in UNREACHABLE):
        pytest.skip(f"the package index cannot be reached: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return python
