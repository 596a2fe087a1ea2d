"""Agents that are programs (`rollout.agent` as a list): a command line started for every sample.

The program finds the policy in its environment, under the names that OpenAI's clients read:

| variable | |
|---|---|
| `OPENAI_BASE_URL`, `OPENAI_API_BASE` | address of the sample's session |
| `OPENAI_API_KEY` | its key |
| `OPENAI_MODEL` | `policy`, the name of the model |
| `MOE_TRM_PROMPT` | a JSON file with the prompt's row: `prompt_id`, `text`, `messages`, `answer`, `extra` |
| `MOE_TRM_REWARD` | a file that may get the reward: a JSON number, or an object of named numbers |
| `TMPDIR` | a folder that is removed after the sample |
| `PATH` | begins with the folder of the run's own Python, so that `python` is that one |
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moe_trm.errors import ConfigError
from moe_trm.rollout.agents.parameters import MODEL
from moe_trm.rollout.credentials import without_key
from moe_trm.runtime.child import Answerer
from moe_trm.runtime.functions.command_line import run_command
from moe_trm.runtime.functions.process import FunctionFailed
from moe_trm.runtime.private import Scratch

MAX_REWARD_BYTES = 65536
"""Longest reward file that is read."""
PROMPT_VARIABLE = "MOE_TRM_PROMPT"
KEY = "config key rollout.agent"


class CommandHost:
    """`AgentHost` for a command line that no shell reads.

    At most `most_at_once` run at the same time. The time of those that wait has not begun.
    """

    def __init__(self, command: Sequence[str], *, limit_s: float, most_at_once: int, max_output_bytes: int) -> None:
        self._command, self._limit_s, self._max_output_bytes = tuple(command), limit_s, max_output_bytes
        self._slots = asyncio.Semaphore(most_at_once)
        self._running: set[asyncio.Task[Any]] = set()
        self._scratch: Scratch | None = None
        self._closed = False

    @property
    def place(self) -> str:
        """The command line, as in a shell."""
        return shlex.join(self._command)

    async def start(self) -> None:
        """Look for the program. Raises `ConfigError`."""
        if shutil.which(self._command[0], path=search_path()) is None:
            raise ConfigError(
                "the agent's program cannot be found",
                where=KEY,
                got=self._command[0],
                expected="a program in PATH, or the path of an executable file",
                fix="a script without the right to be executed is started as [python, path/to/agent.py]",
            )
        self._scratch = await asyncio.to_thread(Scratch)

    async def call(self, payload: Any, answers: Callable[[], Answerer]) -> Any:
        """See `AgentHost.call`."""
        if self._closed:
            raise FunctionFailed("crash", "the run is over")
        task = asyncio.ensure_future(self._run(payload, answers))
        self._running.add(task)
        try:
            # A caller that is cancelled waits until nothing of the command is left.
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise FunctionFailed("crash", "the run is over") from None
            raise
        finally:
            self._running.discard(task)

    async def close(self) -> None:
        """End all commands."""
        self._closed = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running))
        if self._scratch is not None:
            await asyncio.to_thread(self._scratch.remove)

    async def _run(self, payload: Any, answers: Callable[[], Answerer]) -> Any:
        async with self._slots:
            assert self._scratch is not None, "it was started"
            folder = Path(tempfile.mkdtemp(dir=self._scratch.path))
            try:
                answers()
                (folder / "tmp").mkdir()
                (folder / "prompt.json").write_bytes(msgspec.json.encode(payload["prompt"], enc_hook=float))
                environment = environment_of(payload["base_url"], payload["api_key"], folder)
                await run_command(
                    self._command,
                    without_key(os.environ) | environment,
                    mark=f"{PROMPT_VARIABLE}={environment[PROMPT_VARIABLE]}",
                    limit_s=self._limit_s,
                    max_output_bytes=self._max_output_bytes,
                )
                return read_reward_file(folder / "reward.json")
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, True)


def environment_of(base_url: str, api_key: str, folder: Path) -> dict[str, str]:
    """The variables by which a command finds the policy, its prompt and where its reward goes."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": api_key,
        "OPENAI_MODEL": MODEL,
        # Anthropic's clients put /v1 behind it themselves.
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_MODEL": MODEL,
        PROMPT_VARIABLE: str(folder / "prompt.json"),
        "MOE_TRM_REWARD": str(folder / "reward.json"),
        "TMPDIR": str(folder / "tmp"),
        "PATH": search_path(),
    }


def search_path() -> str:
    """The search path of programs, which begins beside the run's own Python."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def read_reward_file(path: Path) -> Any:
    """The reward that a command left; None where it left none.

    Raises `FunctionFailed` (`type`) for a file that is no JSON.
    """
    if not path.exists():
        return None
    if not path.is_file():
        raise FunctionFailed("type", "its reward file is no file")
    with path.open("rb") as file:
        data = file.read(MAX_REWARD_BYTES + 1)
    if len(data) > MAX_REWARD_BYTES:
        raise FunctionFailed("type", f"its reward file has more than {MAX_REWARD_BYTES} bytes")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FunctionFailed("type", f"its reward file is no JSON ({error}): {data[:200]!r}") from error
