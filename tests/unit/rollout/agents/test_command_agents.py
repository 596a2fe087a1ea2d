"""Agents that are command lines: what they find in their environment, what they make, and what a bad one costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_trm.config.idle_settings import idle_settings
from moe_trm.config.schema import Config
from moe_trm.config.task_rules import refusals
from moe_trm.errors import ConfigError
from moe_trm.rollout.agents.agent_sampler import AgentSampler
from moe_trm.rollout.agents.command_host import CommandHost
from moe_trm.rollout.agents.live_session import Policy
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.server import AgentServer
from moe_trm.rollout.build import agent_host
from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.runtime.child import Answerer
from moe_trm.runtime.functions.host import FunctionHost
from moe_trm.runtime.private import Scratch
from moe_trm.types import RolloutRecord
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.test_agent_sampler import PARAMS, TOKENS, MoodTask, speak
from tests.unit.rollout.moods import Outcomes, reasons, together
from tests.unit.sections import sections_of

AGENT = """
import json, os, signal, sys, time, urllib.request

prompt = json.load(open(os.environ["MOE_TRM_PROMPT"]))
mood, history = prompt["extra"]["mood"], list(prompt["messages"])
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]

def say():
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": history}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base}/chat/completions", body, headers)) as answer:
        history.append(json.load(answer)["choices"][0]["message"])

def reward(text):
    open(os.environ["MOE_TRM_REWARD"], "w").write(text)

def forks():
    if os.fork() == 0:
        os.setsid()
        while True: time.sleep(1)

signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mood == "never asks": sys.exit(0)
say()
history.append({"role": "user", "content": "go on"})
say()
if mood == "looks around":
    seen = {name: os.environ.get(name) for name in os.environ if name.startswith(("MOE_TRM", "OPENAI", "TMPDIR"))}
    print(json.dumps({"seen": seen, "prompt": prompt}), file=open(os.environ["SEEN"], "w"))
if mood == "rewards": reward('{"tool": 2, "style": 0.5}')
if mood == "leaves a text": reward('"good"')
if mood == "leaves no json": reward("1 point")
if mood == "leaves nan": reward("NaN")
if mood == "leaves much": reward("1" * 100_000)
if mood == "leaves a pipe": os.mkfifo(os.environ["MOE_TRM_REWARD"])
if mood == "exits": print("no such tool", flush=True); sys.exit(1)
if mood == "hangs": forks(); time.sleep(1000)
if mood == "dies": os.kill(os.getpid(), signal.SIGKILL)
if mood == "prints":
    while True: os.write(1, b"again and again " * 1000)
if mood == "leaves a child": forks()
if mood == "goes on":
    while True: say()
"""
REASONS = {
    "never asks": "empty_output",
    "leaves a text": "rollout_type",
    "leaves no json": "rollout_type",
    "leaves nan": "rollout_type",
    "leaves much": "rollout_type",
    "leaves a pipe": "rollout_type",
    "exits": "rollout_error",
    "dies": "rollout_crash",
    "prints": "rollout_output",
}


async def _nobody(_op: str, _given: dict[str, Any]) -> Any:
    raise AssertionError("a command asks by HTTP")


def no_answers() -> Answerer:
    """The answers to a command that asks nothing."""
    return _nobody


def outcomes(
    folder: Path, names: Sequence[str], *, most_at_once: int = 4, seconds: float = 100.0
) -> tuple[Outcomes, Mapping[str, float]]:
    path = folder / "agent.py"
    path.write_text(AGENT)
    command = [sys.executable, "-S", str(path)]
    host = CommandHost(command, limit_s=seconds, most_at_once=most_at_once, max_output_bytes=100_000)
    server = AgentServer("127.0.0.1", 0, max_body_bytes=1 << 20)
    policy = Policy(SpeakingEngine(speak), TOKENS, AnswerReader(), Limits(4, 1000))
    maker = AgentSampler(host, server, policy, MoodTask(), PARAMS, keep_changed=False)
    return together(maker, names, seconds=300)


def test_each_way_to_fail_costs_its_own_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    moods = ["plays", *REASONS, "leaves a child", "rewards", "goes on"]
    by_mood, metrics = outcomes(tmp_path, moods)
    assert reasons(by_mood) == REASONS
    assert str(by_mood["exits"]).count("exit status 1; its last words: no such tool") == 1
    for mood, turns, reward, reason in (
        ("plays", 2, 2.0, "stop"),
        ("leaves a child", 2, 2.0, "stop"),
        ("rewards", 2, 2 + 4 * 0.5, "stop"),
        ("goes on", 4, 4.0, "length"),
    ):
        record = by_mood[mood]
        assert isinstance(record, RolloutRecord), mood
        assert (record.turn_ids.max() + 1, record.reward, record.finish_reason) == (turns, reward, reason)
    assert metrics["agent/sessions"] == len(moods)
    assert metrics["agent/continued"] == len([mood for mood in moods if mood != "never asks"]) + 2
    assert list(temporary.iterdir()) == []


def test_a_command_that_hangs_costs_its_sample(tmp_path: Path) -> None:
    found, _ = outcomes(tmp_path, ["hangs"], seconds=3.0)
    assert reasons(found) == {"hangs": "rollout_timeout"}
    assert "nothing within 3 s" in str(found["hangs"])


def test_a_command_finds_the_policy_under_the_names_that_clients_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    monkeypatch.setenv(API_KEY_VARIABLE, "the engine's own key")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-the-users-own")
    found, _ = outcomes(tmp_path, ["looks around"])
    assert isinstance(found["looks around"], RolloutRecord)
    told: dict[str, Any] = json.loads((tmp_path / "seen.json").read_text())
    seen = told["seen"]
    assert API_KEY_VARIABLE not in seen
    assert seen["OPENAI_BASE_URL"] == seen["OPENAI_API_BASE"]
    assert "/sessions/" in seen["OPENAI_BASE_URL"]
    assert seen["OPENAI_API_KEY"].startswith("sk-")
    assert seen["OPENAI_API_KEY"] != "sk-the-users-own"
    assert seen["OPENAI_MODEL"] == "policy"
    assert told["prompt"] == {
        "prompt_id": "looks around",
        "text": "be looks around",
        "messages": [{"role": "user", "content": "be looks around"}],
        "answer": "",
        "extra": {"mood": "looks around"},
    }
    assert not Path(seen["TMPDIR"]).exists()


def test_no_more_commands_run_than_allowed(tmp_path: Path) -> None:
    """Each notes how many run beside it."""
    program = (
        "import os, time\n"
        f"folder = {str(tmp_path)!r}\n"
        "own = f'{folder}/running-{os.getpid()}'\n"
        "open(own, 'w')\n"
        "time.sleep(0.2)\n"
        "print(len([name for name in os.listdir(folder) if name.startswith('running-')]),"
        " file=open(f'{folder}/seen-{os.getpid()}', 'w'))\n"
        "os.remove(own)\n"
    )

    async def go() -> None:
        host = CommandHost([sys.executable, "-S", "-c", program], limit_s=60, most_at_once=3, max_output_bytes=1000)
        await host.start()
        payload = {"base_url": "", "api_key": "", "prompt": {}}
        await asyncio.gather(*(host.call(payload, no_answers) for _ in range(12)))
        await host.close()

    asyncio.run(asyncio.wait_for(go(), 200))
    seen = [int(path.read_text()) for path in tmp_path.glob("seen-*")]
    assert len(seen) == 12
    assert max(seen) <= 3


def test_the_end_of_a_run_ends_its_commands() -> None:
    async def go() -> str:
        host = CommandHost(
            [sys.executable, "-S", "-c", "import time; time.sleep(1000)"],
            limit_s=1000,
            most_at_once=1,
            max_output_bytes=1000,
        )
        await host.start()
        payload = {"base_url": "", "api_key": "", "prompt": {}}
        calls = [asyncio.ensure_future(host.call(payload, no_answers)) for _ in range(2)]
        await asyncio.sleep(0.3)
        await host.close()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        return " ".join(str(one) for one in ended)

    assert asyncio.run(asyncio.wait_for(go(), 300)) == "the run is over the run is over"


def test_what_a_killed_run_left_goes_with_the_next_start(tmp_path: Path) -> None:
    """The first command kills the process that started it."""
    program = """
import asyncio, sys
from moe_trm.rollout.agents.command_host import CommandHost

async def go():
    command = [sys.executable, "-c", "import os; os.kill(os.getppid(), 9)"]
    host = CommandHost(command, limit_s=60, most_at_once=1, max_output_bytes=1000)
    await host.start()
    await host.call({"base_url": "", "api_key": "", "prompt": {}}, dict)

asyncio.run(go())
"""
    killed = subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir())
    with Scratch(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_python_is_the_one_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program = f"import sys; open({str(tmp_path / 'seen')!r}, 'w').write(sys.executable)"

    async def go() -> None:
        host = CommandHost(["python", "-c", program], limit_s=60, most_at_once=1, max_output_bytes=1000)
        await host.start()
        await host.call({"base_url": "", "api_key": "", "prompt": {}}, no_answers)
        await host.close()

    asyncio.run(go())
    assert Path((tmp_path / "seen").read_text()).parent == Path(sys.executable).parent


def test_a_program_that_is_not_there_is_refused_at_launch() -> None:
    host = CommandHost(["no-such-program", "x"], limit_s=1, most_at_once=1, max_output_bytes=1)
    with pytest.raises(ConfigError, match="cannot be found"):
        asyncio.run(host.start())


def test_the_setting_is_a_function_or_a_command_line() -> None:
    def config(**sections: object) -> Config:
        return Config.model_validate({"model": {"checkpoint": "unused"}, **sections})

    command = config(rollout={"agent": ["python", "my_agent.py"]}, agent={"max_commands": 3})
    assert command.rollout.has_turns
    assert refusals(command.task, command.rollout, command.train, command.eval) == []
    assert list(idle_settings(command)) == []
    assert isinstance(agent_host(command.agent, command.rollout), CommandHost)
    function = config(rollout={"agent": "a.py:run"})
    assert isinstance(agent_host(function.agent, function.rollout), FunctionHost)
    for wrong in ([], ["python", ""], "python my_agent.py"):
        assert [
            problem.key
            for problem in refusals(*sections_of(config(rollout={"agent": wrong}), "task", "rollout", "train", "eval"))
        ] == ["rollout.agent"]
    idle = list(idle_settings(config(rollout={"agent": "a.py:run"}, agent={"max_output_bytes": 3})))
    assert idle == ["agent.max_output_bytes has no effect: rollout.agent is no command line"]
