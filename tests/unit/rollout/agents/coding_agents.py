"""A repair task of three files, a policy that knows how to solve it, and a coding agent that talks with that policy."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_trm.corrections.evidence import Correction
from moe_trm.observe.transcripts import Transcripts
from moe_trm.rollout.agents.command_host import environment_of
from moe_trm.rollout.agents.live_session import LiveSession, Policy
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.rows import session_rows
from moe_trm.rollout.agents.server import AgentServer
from moe_trm.rollout.agents.tree import SessionTree
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.types import TrainRow
from tests.unit.observe.made_transcripts import judged
from tests.unit.rollout.agents import parsers
from tests.unit.rollout.agents.served import PARAMS, TOKENS, speaker
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.test_tree import check_record

FILES = {
    "prices.py": "PRICES = {'apple': 3, 'pear': 4}\n",
    "shop.py": "from prices import PRICES\n\n\ndef total(names):\n    return sum(-PRICES[name] for name in names)\n",
    "test_shop.py": (
        "import unittest\n\nfrom shop import total\n\n\nclass TestShop(unittest.TestCase):\n"
        "    def test_total(self):\n        self.assertEqual(total(['apple', 'pear']), 7)\n"
    ),
}
TASK = "The test in test_shop.py fails. Repair shop.py."
REPAIR = "sed -i s/sum.-PRICES/sum\\(PRICES/ shop.py"
TESTS = "python3 -m unittest -q"
NO_NETWORK = "http://127.0.0.1:9"
"""A proxy at which nobody listens."""


@dataclass(frozen=True)
class Solved:
    """What a coding agent left: its exit, whether the test passes, and the session."""

    status: int
    output: str
    passes: bool
    tree: SessionTree
    ignored: Sequence[str]


def call(name: str, **arguments: object) -> str:
    """A call of a tool as the policy writes it: with another white space than the template."""
    return f'<tool_call>\n{{"name":"{name}", "arguments":{json.dumps(arguments, separators=(",", ":"))}}}\n</tool_call>'


def solve(
    command: Sequence[str], answers: Sequence[str], folder: Path, more: Mapping[str, str], *, limit_s: float = 500.0
) -> Solved:
    """The task in `folder`, given to the agent that `command` starts; `answers` are the policy's, in turn.

    `more`: environment of the agent. It reaches the session's address, and no other by its proxies.
    """
    work, home = folder / "work", folder / "home"
    work.mkdir(parents=True)
    (home / "tmp").mkdir(parents=True)
    for name, text in FILES.items():
        (work / name).write_text(text)
    assert not passes(work)

    async def go() -> Solved:
        server = AgentServer("127.0.0.1", 0, max_body_bytes=1 << 22)
        await server.start()
        policy = Policy(
            SpeakingEngine(speaker(*answers), masks=True),
            TOKENS,
            AnswerReader(parsers.hermes, parsers.think),
            Limits(40, 200_000),
        )
        session = LiveSession(policy, replace(PARAMS, max_new_tokens=4000), bare=False)
        address = server.open(session)
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NO_NETWORK)
        environment = environment_of(address.base_url, address.api_key, home) | proxies | {"HOME": str(home)}
        environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "LANG": "C.UTF-8"} | {**more}
        expanded = [part.replace("{base_url}", address.base_url) for part in command]
        try:
            process = await asyncio.create_subprocess_exec(
                *expanded,
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            try:
                output, _ = await asyncio.wait_for(process.communicate(), limit_s)
            finally:
                if process.returncode is None:
                    process.kill()
        finally:
            await server.close()
        assert not session.failure.done()
        text = output.decode("utf-8", "replace")
        return Solved(process.returncode or 0, text, passes(work), session.tree, sorted(server._ignored))

    return asyncio.run(go())


def passes(work: Path) -> bool:
    command = [sys.executable, "-m", "unittest", "-q"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=work, capture_output=True, env=environment, check=False).returncode == 0


def check(solved: Solved, dialect: str) -> None:
    """The whole conversation is in the tree, over one interface, and every number of it is right."""
    assert solved.tree.nodes, solved.output[-3000:]
    assert {node.dialect for node in solved.tree.nodes} == {dialect}
    assert all(node.turn.sampling_mask is not None for node in solved.tree.nodes)
    for leaf in solved.tree.leaves():
        check_record(leaf)


def transcript(solved: Solved, folder: Path) -> tuple[str, str]:
    """The session as a run of its own reports it: the text and the page."""
    numbers: dict[str, Any] = {"prompt_id": "shop", "sample_id": 0, "group_id": 0}
    rows = session_rows(solved.tree, "last", **numbers, keep_changed=False, finish_reason="stop")
    row = TrainRow(replace(rows.sample, routes=None, sampling_mask=None, reward=float(solved.passes)))
    batch, evidence, _ = judged([row])
    sink = Transcripts(folder, "nowhere", every=1, rollouts=1, decoder=TOKENS)
    sink.judged([row], evidence, Correction(batch.mask.float(), batch.mask, {}))
    sink.write(1, {})
    path = folder / "transcripts" / "step-000001"
    return path.with_suffix(".txt").read_text(encoding="utf-8"), path.with_suffix(".html").read_text(encoding="utf-8")
