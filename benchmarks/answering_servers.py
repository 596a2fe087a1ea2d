"""Servers that answer requests for samples with recorded bytes, sent from files: what an engine asks of the intake.

They know what a controller asks SGLang: health, the model, loading of weights. The first id of a prompt chooses the
answer. `hold` keeps all answers back until so many requests are there, and `die` loses servers once they are let go.
"""

from __future__ import annotations

import asyncio
import base64
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import orjson
from aiohttp import web

from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.route_defects import ROUTE_DEFECTS

MODEL = ServedModel("DeepseekV3ForCausalLM", 129280, 61, tuple(range(3, 61)), 256, 8)
HF_CONFIG = {
    "architectures": [MODEL.architecture],
    "vocab_size": MODEL.vocab_size,
    "num_hidden_layers": MODEL.num_layers,
    "first_k_dense_replace": 3,
    "n_routed_experts": MODEL.num_experts,
    "num_experts_per_tok": MODEL.top_k,
}
AWAY_S = 2.0
"""Time until a server that died is there again, with other weights."""


def answer(context: int, sampled: int, version: str = "0", *, broken: bool = False, seed: int = 0) -> bytes:
    """One answer of DeepSeek-V3 to `context` ids. `broken`: an expert twice in its last row."""
    rng, rows = np.random.default_rng(seed), context + sampled - 1
    output = rng.integers(0, MODEL.vocab_size, sampled).tolist()
    # Eight neighbours from a random first one on: distinct, and of every expert.
    first = rng.integers(0, MODEL.num_experts, (rows, MODEL.num_layers, 1), np.int32)
    experts = (first + np.arange(MODEL.top_k, dtype=np.int32)) % MODEL.num_experts
    experts[-1, -1, -1] = experts[-1, -1, 0] if broken else experts[-1, -1, -1]
    meta = {
        "finish_reason": {"type": "stop", "message": ""},
        "prompt_tokens": context,
        "num_retractions": 0,
        "output_token_logprobs": [
            [-float(value), token, None] for value, token in zip(rng.random(sampled), output, strict=True)
        ],
        "weight_versions": [{"version": version, "start": 0, "end": sampled}],
        "routed_experts": base64.b64encode(experts.tobytes()).decode(),
    }
    return orjson.dumps({"output_ids": output, "meta_info": meta})


class AnsweringServers:
    """All servers of one process.

    Args:
        answers: files with the bodies; a prompt's first id modulo their number chooses.
        hold: requests that must be there before any is answered.
        die: servers that are lost then, with all that they owe.
    """

    def __init__(self, answers: Sequence[Path], *, hold: int, die: int) -> None:
        self._answers, self._hold, self._die = answers, hold, die
        self._probe = answer(1, 1, "default")
        self._waiting, self._free = 0, asyncio.Event()
        self.sites: list[_Server] = []

    async def start(self, count: int) -> list[str]:
        """Start `count` servers; returns their addresses."""
        for _ in range(count):
            server = _Server(self)
            await server.listen()
            self.sites.append(server)
        return [f"http://127.0.0.1:{server.port}" for server in self.sites]

    async def generate(self, server: _Server, request: web.Request) -> web.StreamResponse:
        """The answer of one of the servers."""
        body = orjson.loads(await request.read())
        asked = body.get("token_ids_logprob")
        if asked is not None and asked[0] >= MODEL.vocab_size:
            return web.Response(status=400)
        if len(body["input_ids"]) == 1:
            return web.Response(body=self._probe)
        self._waiting += 1
        if self._waiting >= self._hold and not self._free.is_set():
            self._free.set()
            for lost in random.Random(0).sample(self.sites, self._die):
                lost.away, lost.dies = True, asyncio.ensure_future(lost.die())
        await self._free.wait()
        if server.away and request.transport is not None:
            request.transport.abort()
        # A file is sent by the kernel (sendfile): next to nothing of the machine is spent on this side.
        return web.FileResponse(self._answers[body["input_ids"][0] % len(self._answers)])


class _Server:
    """One address. It serves version `label`."""

    def __init__(self, all_servers: AnsweringServers) -> None:
        self._all, self.label, self.port, self.away = all_servers, "default", 0, False
        self.dies: asyncio.Future[None] | None = None

    async def listen(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", partial(self._all.generate, self))
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/server_info", self._info)
        for path in ("pause_generation", "update_weights_from_disk", "continue_generation", "abort_request"):
            app.router.add_post(f"/{path}", self._post)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=4096)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def die(self) -> None:
        """Drop every connection, and come back with other weights."""
        await self._runner.cleanup()
        await asyncio.sleep(AWAY_S)
        self.label, self.away = "default", False
        await self.listen()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        info = {
            **{defect.setting: defect.harmless[0] for defect in ROUTE_DEFECTS},
            "architectures": [MODEL.architecture],
            "weight_version": self.label,
            "enable_return_routed_experts": True,
            "dtype": "bfloat16",
            "version": "0.5.23",
        }
        return web.json_response(info)

    async def _post(self, request: web.Request) -> web.Response:
        if request.path == "/update_weights_from_disk":
            self.label = (await request.json())["weight_version"]
        return web.json_response({"success": True})


def run(tell: Connection, answers: Sequence[Path], count: int, hold: int, die: int) -> None:
    """Serve until the other end closes."""

    async def serve() -> None:
        servers = AnsweringServers(answers, hold=hold, die=die)
        tell.send(await servers.start(count))
        await asyncio.to_thread(tell.recv)

    asyncio.run(serve())


@contextmanager
def answering(bodies: Sequence[bytes], count: int, *, hold: int = 0, die: int = 0) -> Iterator[list[str]]:
    """Addresses of `count` servers in a process of their own."""
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.json" for number in range(len(bodies))]
        for path, body in zip(paths, bodies, strict=True):
            path.write_bytes(body)
        here, there = spawn.Pipe()
        process = spawn.Process(target=run, args=(there, paths, count, hold, die), daemon=True)
        process.start()
        yield here.recv()
        here.send(None)
        process.join(10)
        process.kill()
