"""The examples of OpenAI's and Anthropic's packages, as these ship them, as agents on a real SGLang server."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_trm.config.schema import Config
from moe_trm.rollout.agents.command_host import environment_of
from moe_trm.rollout.agents.live_session import LiveSession, Policy
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.rows import session_rows
from moe_trm.rollout.agents.server import AgentServer
from moe_trm.rollout.agents.tree import SessionTree
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.process import Server
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.tasks.build import build_task
from moe_trm.types import SamplingParams
from tests.integration.served import load, make_push
from tests.integration.test_agent_sessions import with_template
from tests.integration.test_calculator import check_against_hf

EXAMPLES = Path(__file__).parents[1] / "data" / "sdk_examples"
RUN = {
    "openai_demo": ["chat"] * 3,
    "openai_async_demo": ["completions"],
    "openai_streaming": ["completions"] * 2,
    "openai_parsing_tools": ["chat"],
    "openai_streaming_tools": ["responses"],
    "anthropic_messages": ["messages"] * 2,
    "anthropic_messages_stream": ["messages"],
    "anthropic_tools": ["messages"] * 2,
    "anthropic_tools_stream": ["messages"],
    "anthropic_tools_runner": ["messages"] * 2,
    "anthropic_thinking": ["messages"],
    "anthropic_thinking_stream": ["messages"],
}
"""Interfaces of the answers of each example."""
REFUSED = {
    "openai_parsing": "response_format=",
    "anthropic_images": "only blocks of type text",
    "anthropic_web_search": "web_search",
}
"""What would be another distribution, or what the policy cannot be given."""
QUERY = {"table_name": "orders", "columns": ["id"], "conditions": [], "order_by": "asc"}
ARGUMENTS = {"Query": QUERY, "get_weather": {"location": "SF", "units": "c"}}


class FirstAnswerCalls:
    """A parser of tool calls for a policy that knows none: it finds one in the first answer of a session."""

    def __init__(self) -> None:
        self._first: str | None = None

    def __call__(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Mapping[str, Any]]]:
        if self._first is None:
            self._first = text
        name = tools[0]["function"]["name"]
        return text, [{"name": name, "arguments": ARGUMENTS[name]}] if text == self._first else []


@pytest.mark.long
def test_the_examples_of_the_packages_run_as_they_are(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    for package in ("anthropic", "openai.resources"):
        pytest.importorskip(package, reason=f"{package}, or a part of it, is missing", exc_type=ImportError)
    load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 0))
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=250, max_new_tokens=12, stop_token_ids=(2,))
    folders = {name: tmp_path / name for name in (*RUN, *REFUSED)}

    async def work() -> list[tuple[int, str, LiveSession]]:
        engine = ServerEngine(served_config, rollout_server.api_key)
        settings = served_config.task.model_copy(update={"eval_size": 0})
        tokens = build_task(settings, str(with_template(tiny_moe, tmp_path / "chat")), 0).tokens
        server = AgentServer("127.0.0.1", 0, max_body_bytes=1 << 20)
        await server.start()
        await engine.start()
        try:
            policy = Policy(engine, tokens, AnswerReader(), Limits(9, 600))
            return await asyncio.gather(*(run_example(folder, server, policy, params) for folder in folders.values()))
        finally:
            await server.close()
            await engine.close()

    results = dict(zip(folders, asyncio.run(work()), strict=True))
    outputs = {name: output for name, (status, output, _) in results.items() if status != (name in REFUSED)}
    assert not outputs
    answers = {name: [node.dialect for node in session.tree.nodes] for name, (_, _, session) in results.items()}
    assert answers == RUN | {name: [] for name in REFUSED}
    for name, (_, output, session) in results.items():
        assert not session.failure.done()
        if name in REFUSED:
            assert "BadRequestError" in output
            assert REFUSED[name] in output
        else:
            check_rows(session.tree, tiny_moe, params)


async def run_example(
    folder: Path, server: AgentServer, policy: Policy, params: SamplingParams
) -> tuple[int, str, LiveSession]:
    """Exit status, output and session of the example that the folder is named after."""
    text = (EXAMPLES / f"{folder.name}.txt").read_text(encoding="utf-8")
    (folder / "tmp").mkdir(parents=True)
    (folder / "example.py").write_text(text, encoding="utf-8")
    (folder / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    names = tuple(re.findall(r'model="([^"]+)"', text))
    session = LiveSession(
        replace(policy, reader=AnswerReader(FirstAnswerCalls()), model_names=names), params, bare=False
    )
    address = server.open(session)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(folder / "example.py"),
        cwd=folder,
        env=os.environ | environment_of(address.base_url, address.api_key, folder),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return await process.wait(), output.decode(errors="replace"), session


def check_rows(tree: SessionTree, checkpoint: Path, params: SamplingParams) -> None:
    """Every branch: its routes and log-probs are those of one forward over the whole of it."""
    rows = session_rows(
        tree, "trajectory", prompt_id="p", sample_id=0, group_id=0, keep_changed=False, finish_reason="stop"
    )
    assert not rows.rejections
    assert not rows.left_out
    for record in rows.sample.rows:
        check_against_hf(record, checkpoint, params)
