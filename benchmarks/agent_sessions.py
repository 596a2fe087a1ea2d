"""Agents' sessions by the hundred: requests per second, memory of a session, and time that the session server adds.

`python -m benchmarks.agent_sessions [--sessions N] [--turns N] [--engine-s S] [--dialect D] [--json FILE]` serves an
engine that answers after S seconds, and clients in a second process. Each client talks with its own session turn after
turn, with its whole history, and checks that every answer has the secret of its session. Then the same clients talk
with the same engine without sessions, over a server that reads JSON and writes JSON. Both rows have the time that a
client waits beyond S; the difference is added by sessions. CPU seconds are the server process's own. Memory is of the
first row alone: the second has what the first one freed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil
from aiohttp import web

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.models.tiny.checkpoint import character_tokenizer, save, tiny_model
from moe_trm.rollout.agents.dialects.chat import CHAT
from moe_trm.rollout.agents.dialects.dialect import SessionFacts
from moe_trm.rollout.agents.live_session import LiveSession, Policy
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.server import AgentServer
from moe_trm.rollout.sessions.dialogue import Limits, TurnEngine
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import SampledTurn, SamplingParams
from routing import RouteRecord, token_digest

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
LAYERS, EXPERTS, TOP_K = (0, 1, 2, 3), 16, 2
DIALECTS = ("chat/completions", "messages", "responses")


class DelayedEngine:
    """Answers after `delay_s` with the digits that the conversation begins with."""

    def __init__(self, tokens: Tokens, delay_s: float) -> None:
        self._tokens, self._delay_s = tokens, delay_s

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        await asyncio.sleep(self._delay_s)
        secret = self._tokens.decode_all(context[:40]).partition("u:")[2].partition("+")[0]
        sampled = np.array([*self._tokens.encode_plain(secret), *self._tokens.stop_token_ids], np.int32)
        ids = np.array([*context, *sampled], np.int32)
        experts = np.zeros((len(ids) - 1 - start, len(LAYERS), TOP_K), np.uint8)
        logprobs = np.full(len(sampled), -0.5, np.float32)
        return SampledTurn(
            tokens=sampled,
            rollout_logprobs=logprobs,
            full_logprobs=logprobs,
            versions=np.zeros(len(sampled), np.int32),
            routes=RouteRecord(experts, LAYERS, EXPERTS, token_digest(ids)),
            sampling_mask=None,
            finish_reason="stop",
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--sessions", type=int, default=500, help="sessions at the same time (default: 500)")
    parser.add_argument("--turns", type=int, default=20, help="answers of each session (default: 20)")
    parser.add_argument("--engine-s", type=float, default=10.0, help="seconds of an answer (default: 10)")
    parser.add_argument(
        "--dialect", choices=DIALECTS, default=DIALECTS[0], help="interface (default: chat/completions)"
    )
    parser.add_argument("--addresses", help="internal: this process is the clients'")
    args = parser.parse_args(argv)
    if args.addresses:
        asyncio.run(talk(Path(args.addresses), args.turns, args.engine_s, args.dialect))
        return 0
    rows = asyncio.run(measure(args.sessions, args.turns, args.engine_s, args.dialect))
    report(f"{args.sessions} sessions of {args.turns} turns, an engine of {args.engine_s:g} s", rows, args.json)
    return 0


async def measure(num_sessions: int, turns: int, engine_s: float, dialect: str) -> list[Row]:
    """Figures of sessions, then of the engine alone."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = character_tokenizer()
        tokenizer.chat_template = TEMPLATE
        save(tiny_model(0), tokenizer, Path(folder))
        tokens = Tokens(folder)
        params = SamplingParams(max_new_tokens=64, stop_token_ids=tokens.stop_token_ids)
        policy = Policy(DelayedEngine(tokens, engine_s), tokens, AnswerReader(), Limits(turns, 1 << 20))
        await _first_answer(policy, params)
        file, options = Path(folder) / "addresses.json", ("--engine-s", str(engine_s), "--dialect", dialect)
        command = [sys.executable, "-m", "benchmarks.agent_sessions", "--addresses", str(file), "--turns", str(turns)]
        command += options
        server = AgentServer("127.0.0.1", 0, max_body_bytes=1 << 24)
        await server.start()
        sessions = [LiveSession(policy, params, bare=False) for _ in range(num_sessions)]
        opened = [server.open(session) for session in sessions]
        addresses = [(address.base_url, address.api_key) for address in opened]
        # First, since what one of them has allocated serves the other.
        rows = [await _served({"server": "sessions", "interface": dialect}, command, addresses)]
        await server.close()
        engine_server = EngineAlone(policy.engine, tokens, params)
        await engine_server.start()
        addresses = [(engine_server.url, "none")] * num_sessions
        rows.append(await _served({"server": "engine alone", "interface": dialect}, command, addresses))
        await engine_server.close()
    assert all(len(session.tree.nodes) == turns == len(session.tree.leaves()[0].path()) for session in sessions)
    return rows


async def _served(names: Row, command: Sequence[str], addresses: Sequence[tuple[str, str]]) -> Row:
    """Figures of one server; `command` starts the clients."""
    Path(command[command.index("--addresses") + 1]).write_text(json.dumps(addresses))
    _freeze()
    process = psutil.Process()
    resident, cpu, start_s = process.memory_info().rss, sum(process.cpu_times()[:2]), time.monotonic()
    clients = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await clients.communicate()
    seconds, cpu = time.monotonic() - start_s, sum(process.cpu_times()[:2]) - cpu
    resident = process.memory_info().rss - resident
    assert clients.returncode == 0, "a client failed"
    added = np.array(json.loads(output)) * 1e3
    return {
        **names,
        "requests": len(added),
        "requests_per_s": round(len(added) / seconds, 1),
        "added_ms_p50": round(float(np.percentile(added, 50)), 1),
        "added_ms_p99": round(float(np.percentile(added, 99)), 1),
        "server_cpu_ms_per_request": round(cpu * 1e3 / len(added), 2),
        "kib_per_session": round(resident / len(addresses) / 1024, 1),
    }


class EngineAlone:
    """The engine over HTTP without sessions: one JSON in, one JSON out."""

    def __init__(self, engine: TurnEngine, tokens: Tokens, params: SamplingParams) -> None:
        self._engine, self._tokens, self._params = engine, tokens, params
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 24)
        for dialect in DIALECTS:
            app.router.add_post(f"/{dialect}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0])

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        [first, *_] = body.get("messages") or body["input"]
        turn = await self._engine.turn(self._tokens.encode_plain(f"u:{first['content']}"), self._params)
        text = self._tokens.decode(turn.tokens.tolist())
        return web.Response(body=msgspec.json.encode({"content": [{"text": text}]}), content_type="application/json")


async def _first_answer(policy: Policy, params: SamplingParams) -> None:
    """Imports what the first request of a run imports, and has the template compiled."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "100000+1="}]}
    session = LiveSession(policy, params, bare=False)
    await session.answer(CHAT.read(body, SessionFacts(params, session.reads_calls, session.kept)), "first")


def _freeze() -> None:
    """As the controller of a run does: collections leave what was imported alone."""
    gc.collect()
    gc.freeze()


async def talk(file: Path, turns: int, engine_s: float, dialect: str) -> None:
    """All clients, which begin one after the other; prints the seconds that each request took beyond the engine's."""
    addresses = json.loads(file.read_text())
    added: list[float] = []
    _freeze()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(
            *(
                _client(http, url, key, 100000 + number, turns, dialect, engine_s * number / len(addresses), added)
                for number, (url, key) in enumerate(addresses)
            )
        )
    print(json.dumps([seconds - engine_s for seconds in added]))


async def _client(
    http: aiohttp.ClientSession,
    url: str,
    key: str,
    secret: int,
    turns: int,
    dialect: str,
    wait_s: float,
    added: list[float],
) -> None:
    await asyncio.sleep(wait_s)
    history: list[dict[str, Any]] = [{"role": "user", "content": f"{secret}+1="}]
    field = "input" if dialect == "responses" else "messages"
    limit = {"max_tokens": 64} if dialect == "messages" else {}
    for _ in range(turns):
        start_s = time.monotonic()
        body = {"model": "policy", field: history, **limit}
        async with http.post(f"{url}/{dialect}", json=body, headers={"Authorization": f"Bearer {key}"}) as response:
            answer = await response.json()
        added.append(time.monotonic() - start_s)
        text = _text(answer)
        assert text == str(secret), f"{text!r} is not of the session {secret}"
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": "and+1="}]


def _text(answer: dict[str, Any]) -> object:
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    content = answer["output"][0]["content"] if "output" in answer else answer["content"]
    return content[0]["text"]


if __name__ == "__main__":
    sys.exit(main())
