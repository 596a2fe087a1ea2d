"""vLLM as an engine with servers: what the rest of the harness asks of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_trm.config.engines import ENGINES
from moe_trm.errors import EngineLost
from moe_trm.rollout.servers.backend import Launch, Served, ServerBackend
from moe_trm.rollout.servers.http import EngineHttp, parsed
from moe_trm.rollout.servers.process import on_cpu
from moe_trm.rollout.vllm.answers import VllmAnswers
from moe_trm.rollout.vllm.client import WEIGHTS, VllmClient
from moe_trm.rollout.vllm.given_tokens import greedy_tokens, scores_of
from moe_trm.rollout.vllm.launch import interpreter, launch_command, server_environment
from moe_trm.runtime.addresses import is_loopback

GRACE_S = 3.0
"""Time in which a server on GPUs may end by itself."""


class VllmBackend(VllmAnswers, ServerBackend):
    """vLLM's API server with packages/vllm_worker, over HTTP."""

    traits = ENGINES["vllm"]
    answers = "moe_trm.rollout.vllm.answers:VllmAnswers"
    labels_runs = True
    client = staticmethod(VllmClient)
    decoded, prefilled = staticmethod(greedy_tokens), staticmethod(scores_of)

    def check(self, served: Served) -> None:
        """See `model_rules`; also a start without vLLM. Raises `CheckpointError`, `ConfigError`."""
        super().check(served)
        if served.rollout.starts_server:
            interpreter()

    @contextmanager
    def launch(self, served: Served, port: int, api_key: str, folder: Path) -> Iterator[Launch]:
        """`python -m vllm.entrypoints.openai.api_server`, of vLLM's own environment."""
        server, checkpoint = served.rollout.server, Path(served.model.checkpoint).resolve()
        cpu, on_one_host = on_cpu(server), is_loopback(server.host)
        command = launch_command(server, checkpoint, port, seed=served.seed, routes=served.routes, cpu=cpu)
        environment = server_environment(os.environ, api_key, folder, cpu=cpu, alone=on_one_host)
        yield Launch(command, environment, 0.0 if cpu else GRACE_S)

    async def version(self, http: EngineHttp, *, timeout_s: float) -> str:
        """The label of the last push; `none` before the first."""
        content = await http.request("GET", WEIGHTS, timeout_s=timeout_s, attempts=1)
        body = parsed(content, http.url)
        if not isinstance(body, dict) or "version" not in body:
            raise EngineLost("something else than vLLM answers here", where=http.url, got=content[:200])
        return str(body["version"])

    async def abort(self, http: EngineHttp) -> None:
        """For all."""
        await http.post("/moe_trm/abort", {})

    async def tokenized(self, http: EngineHttp, text: str) -> tuple[int, ...] | None:
        """By `/tokenize`."""
        return tuple((await http.post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"])

    async def model_folder(self, http: EngineHttp) -> Path | None:
        """The folder that it was started with."""
        return Path(str((await http.get(WEIGHTS))["model"]))
