"""A third rollout engine with servers: its `ServerBackend`, in this file. The server is `script_server.py` beside it.

`rollout.engine=tests/unit/rollout/scripted_backend.py:ScriptedBackend` is all that names it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from moe_trm.config.engines import EngineTraits
from moe_trm.errors import EngineError, EngineLost, RecordRejected, SyncError
from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.rollout.servers.backend import (
    Array,
    Delivery,
    Digests,
    Launch,
    Requirements,
    Served,
    ServerBackend,
    ServerClient,
)
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.ownership import label_of, version_of
from moe_trm.rollout.servers.question import Question
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import SampledTurn
from tests.unit.rollout.script_server import SCRIPT, digests


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of an answer. `seen`: tokens of the context."""

    tokens: list[int]
    logprobs: list[float]
    weights: str
    finish: str
    seen: int


class ScriptedBackend(ServerBackend):
    """See `ServerBackend`."""

    traits = EngineTraits(
        records_routes=False, records_masks=False, has_servers=True, lends_memory=False, awaits_weights=True
    )
    labels_runs = True
    generate_path = "/say"
    alive_path = "/weights"

    @contextmanager
    def launch(self, served: Served, port: int, api_key: str, folder: Path) -> Iterator[Launch]:
        server = served.rollout.server
        program = str(Path(__file__).resolve().with_name("script_server.py"))
        place = ["--host", server.host, "--port", str(port)]
        command = [sys.executable, program, *place, "--key-in", API_KEY_VARIABLE]
        yield Launch([*command, *server.extra_args], {**os.environ, API_KEY_VARIABLE: api_key})

    def request(self, question: Question) -> dict[str, object]:
        params = question.params
        return {"ids": question.context, "most": params.max_new_tokens, "stop": params.stop_token_ids}

    def parse(self, body: bytes | memoryview, question: Question, model: ServedModel) -> SampledTurn:
        try:
            answer = msgspec.json.decode(body, type=Answer)
        except msgspec.DecodeError as error:
            raise RecordRejected("malformed", "not an answer of the script", got=str(error)) from error
        if answer.seen != len(question.context):
            raise RecordRejected("prompt_length", "another prompt", got=answer.seen, expected=len(question.context))
        if answer.finish == "abort" and not (question.requested.partial and answer.tokens):
            raise RecordRejected("aborted", "the server ended the answer")
        if len(answer.logprobs) != len(answer.tokens):
            raise RecordRejected("logprob_count", "not one log-prob per token", got=len(answer.logprobs))
        tokens = np.array(answer.tokens, np.int32)
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= model.vocab_size:
            raise RecordRejected("token_range", "no token of the vocabulary", got=answer.tokens)
        logprobs = np.array(answer.logprobs, np.float32)
        versions = np.full(len(tokens), version_of(answer.weights, question.requested.run), np.int32)
        return SampledTurn(tokens, logprobs, logprobs, versions, None, None, answer.finish)

    async def version(self, http: EngineHttp, *, timeout_s: float) -> str:
        return str(json.loads(await http.request("GET", "/weights", timeout_s=timeout_s, attempts=1))["weights"])

    async def abort(self, http: EngineHttp) -> None:
        await http.post("/abort", {})

    async def decoded(self, http: EngineHttp, token_ids: Sequence[int], count: int) -> tuple[Array, Array]:
        told = await http.post("/score", {"count": count, "decodes": True})
        return np.full(count, SCRIPT[0][0]), np.array(told["logprobs"])

    async def prefilled(self, http: EngineHttp, token_ids: Sequence[int]) -> Array:
        return np.array((await http.post("/score", {"count": len(token_ids) - 1, "decodes": False}))["logprobs"])

    def client(self, requirements: Requirements) -> ScriptedClient:
        return ScriptedClient(requirements.verify, requirements.run)


class ScriptedClient(ServerClient):
    """See `ServerClient`. The proof of a push is the digest of every tensor that the server read."""

    def __init__(self, verify: bool, run: str) -> None:
        self._verify, self._run = verify, run

    async def check(self, http: EngineHttp) -> None:
        if (served := await http.get("/weights")).get("engine") != "script":
            raise EngineError("this is no server of the script", where=http.url, got=served, expected="engine: script")

    def expected_digests(self, push: WeightPush) -> Digests:
        found = digests(Path(push.directory))
        if found != {entry.name: entry.digest for entry in push.tensors}:
            raise SyncError("files of the push differ from the learner's memory", where=push.directory)
        return [found]

    async def load(self, http: EngineHttp, delivery: Delivery) -> None:
        push = delivery.push
        try:
            with delivery.keeping:
                label = label_of(push.version, self._run)
                told = await http.post("/load", {"folder": push.directory, "version": label})
                if delivery.expected is not None and [told["digests"]] != await delivery.expected:
                    raise SyncError("the server read other tensors than the learner wrote", where=http.url)
                if told["weights"] != label:
                    raise SyncError("the server labels its weights with another version", got=told["weights"])
        except EngineLost:
            raise
        except EngineError as error:
            raise SyncError("the server did not load the push", where=push.directory, got=error.got) from error
