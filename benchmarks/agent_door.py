"""The cost of the door for agents: tokens per second through it, and past it, of sessions at the same time.

`python -m benchmarks.agent_door [--sessions N] [--pairs N] [--turns N] [--json FILE]` starts one SGLang server on a
tiny random model. Every session sends its text so far with every request, and appends a few words to each answer.

- `endpoint`: the same client asks SGLang's own `/v1/completions`, and then the door. Nothing is recorded but log-probs.
- `recording`: the product's own engine is called with ids, and then the door. Both record routes and sampling masks.

The two ways take turns, and the first one changes from pair to pair. The overhead is 1 minus the ratio of tokens per
second. It is the median over pairs, with the 95% interval of a bootstrap over pairs.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.options import command_line
from benchmarks.rollout import KEY, push_of, with_engine
from benchmarks.table import Row, report
from moe_trm.config.schema import Config
from moe_trm.models.tiny.checkpoint import make_checkpoint
from moe_trm.rollout.agents.live_session import LiveSession, Policy
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.request import MODEL
from moe_trm.rollout.agents.server import AgentServer
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import SamplingParams

ANSWER_TOKENS = 32
RESULT = "=[12] and so on\n"
"""Text that a session appends to an answer, as a tool would."""
TARGET = 0.05
PARAMS = SamplingParams(temperature=1.0, top_p=0.95, top_k=64, max_new_tokens=ANSWER_TOKENS)
Way = Callable[[int], Awaitable[int]]
"""Runs all sessions once, for a seed; its value is the number of sampled tokens."""


@dataclass(frozen=True)
class Bench:
    """The parts that all ways share."""

    engine: ServerEngine
    tokens: Tokens
    server: Server
    sessions: int
    turns: int

    def prompt(self, seed: int, number: int) -> str:
        """The beginning of one session: other letters in each, so that no cache helps across sessions."""
        rng = np.random.default_rng((seed, number))
        return "".join(map(chr, rng.integers(97, 123, 20).tolist())) + ":"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--sessions", type=int, default=64, help="sessions at the same time (default: 64)")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of runs of each kind (default: 15)")
    parser.add_argument("--turns", type=int, default=4, help="answers in a session (default: 4)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), args.sessions, args.pairs, args.turns)
    report("Tokens per second of agents through the door and past it", rows, args.json)
    over = [str(row["kind"]) for row in rows if float(row["overhead"]) > TARGET]
    print(f"\nabove the target of {TARGET:.0%}: {', '.join(over) or 'none'}")
    return 0


def measure(folder: Path, sessions: int, pairs: int, turns: int) -> list[Row]:
    """One row for each kind of pair."""
    checkpoint = folder / "checkpoint"
    make_checkpoint(checkpoint)
    config = Config.model_validate(
        {
            "model": {"checkpoint": str(checkpoint)},
            "rollout": {
                "concurrency": sessions,
                "server": {"port": 0, "dtype": "float32", "max_running_requests": sessions, "startup_timeout_s": 600},
            },
        }
    )
    push = push_of(checkpoint, folder / "push")
    server = start_server(config, folder / "server.log", KEY)
    try:

        async def work(engine: ServerEngine) -> list[Row]:
            await engine.load_weights(push)
            bench = Bench(engine, Tokens(checkpoint), server, sessions, turns)
            kinds: Mapping[str, tuple[Way, Way]] = {
                "endpoint": (lambda seed: own_endpoint(bench, seed), lambda seed: door(bench, seed, bare=True)),
                "recording": (lambda seed: own_engine(bench, seed), lambda seed: door(bench, seed, bare=False)),
            }
            return [await compared(kind, ways, sessions, pairs) for kind, ways in kinds.items()]

        return asyncio.run(with_engine(config, server, work))
    finally:
        server.stop()


async def compared(kind: str, ways: tuple[Way, Way], sessions: int, pairs: int) -> Row:
    """The row of one kind: `past` the door, `through` it, and what the door costs."""
    past, through = [], []
    for pair in range(pairs + 1):
        rates = {}
        for place in (0, 1) if pair % 2 else (1, 0):
            began = time.perf_counter()
            sampled = await ways[place](pair)
            rates[place] = sampled / (time.perf_counter() - began)
        if pair:  # the first one warms up
            past.append(rates[0])
            through.append(rates[1])
    overhead = 1 - np.array(through) / np.array(past)
    low, high = interval(overhead)
    return {
        "kind": kind,
        "sessions": sessions,
        "pairs": pairs,
        "past_tokens_per_s": round(float(np.median(past))),
        "through_tokens_per_s": round(float(np.median(through))),
        "overhead": round(float(np.median(overhead)), 4),
        "low": round(low, 4),
        "high": round(high, 4),
    }


def interval(values: np.ndarray, resamples: int = 4000) -> tuple[float, float]:
    """The 95% interval of the median of `values`, by a bootstrap with a fixed seed."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (resamples, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


async def own_endpoint(bench: Bench, seed: int) -> int:
    """Every session asks SGLang's own endpoint."""
    fields = {
        "temperature": PARAMS.temperature,
        "top_p": PARAMS.top_p,
        "top_k": PARAMS.top_k,
        "logprobs": 0,
    }
    addresses = [(f"{bench.server.url}/v1", KEY)] * bench.sessions
    return await _asked(bench, seed, addresses, {"model": "default", **fields})


async def door(bench: Bench, seed: int, *, bare: bool) -> int:
    """Every session asks at an address of its own."""
    server = AgentServer("127.0.0.1", 0, max_body_bytes=1 << 20)
    await server.start()
    policy = Policy(bench.engine, bench.tokens, AnswerReader(), Limits(bench.turns, 1 << 20))
    try:
        opened = [server.open(LiveSession(policy, PARAMS, bare=bare)) for _ in range(bench.sessions)]
        addresses = [(address.base_url, address.api_key) for address in opened]
        # SGLang's endpoint gives log-probs as the door does; a call of the engine writes none as text.
        return await _asked(bench, seed, addresses, {"model": MODEL, **({"logprobs": 0} if bare else {})})
    finally:
        await server.close()


async def own_engine(bench: Bench, seed: int) -> int:
    """Every session calls the engine with its ids, as a rollout function does."""
    result = bench.tokens.encode_plain(RESULT)

    async def talk(number: int) -> int:
        ids, known, sampled = bench.tokens.encode(bench.prompt(seed, number)), 0, 0
        for _ in range(bench.turns):
            turn = await bench.engine.turn(ids, PARAMS, start=known)
            ids = (*ids, *turn.tokens.tolist())
            known = len(ids) - 1
            ids = (*ids, *result)
            sampled += turn.num_sampled
        return sampled

    return sum(await asyncio.gather(*(talk(number) for number in range(bench.sessions))))


async def _asked(bench: Bench, seed: int, addresses: Sequence[tuple[str, str]], fields: Mapping[str, object]) -> int:
    """Sampled tokens of all sessions, by one client over HTTP."""
    connector = aiohttp.TCPConnector(limit=0)

    async def talk(client: aiohttp.ClientSession, number: int) -> int:
        (base_url, key), text, sampled = addresses[number], bench.prompt(seed, number), 0
        for _ in range(bench.turns):
            body = {"prompt": text, "max_tokens": ANSWER_TOKENS, **fields}
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post(f"{base_url}/completions", json=body, headers=headers) as response:
                answer = await response.json()
                if response.status != 200:
                    raise RuntimeError(answer)
            sampled += answer["usage"]["completion_tokens"]
            text += answer["choices"][0]["text"] + RESULT
        return sampled

    async with aiohttp.ClientSession(connector=connector) as client:
        return sum(await asyncio.gather(*(talk(client, number) for number in range(bench.sessions))))


if __name__ == "__main__":
    sys.exit(main())
