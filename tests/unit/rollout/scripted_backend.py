"""A third rollout engine with servers, whole in this file: its `ServerBackend`, and the server that it starts.

`rollout.engine=tests/unit/rollout/scripted_backend.py:ScriptedBackend` is all that names it. The server answers by a
script, reads every pushed tensor and says what it read. `rollout.server.extra_args` tells it what to do wrong.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from moe_trm.config.engines import EngineTraits
from moe_trm.config.schema import Config
from moe_trm.errors import EngineError, EngineLost, RecordRejected, SyncError
from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.rollout.servers.backend import Array, Delivery, Launch, Requirements, ServerBackend, ServerClient
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.ownership import label_of, version_of
from moe_trm.rollout.servers.question import Question
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import SampledTurn

SCRIPT = ((5, 6), (7,), (5, 5, 6), (6, 7, 5, 4))
"""The answers in turn; the request's stop token comes after each."""
LOGPROB = -0.5


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
    def launch(self, config: Config, port: int, api_key: str, folder: Path) -> Iterator[Launch]:
        server = config.rollout.server
        command = [sys.executable, str(Path(__file__).resolve()), "--port", str(port)]
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
        if answer.finish == "abort" and not (question.wanted.partial and answer.tokens):
            raise RecordRejected("aborted", "the server ended the answer")
        if len(answer.logprobs) != len(answer.tokens):
            raise RecordRejected("logprob_count", "not one log-prob per token", got=len(answer.logprobs))
        tokens = np.array(answer.tokens, np.int32)
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= model.vocab_size:
            raise RecordRejected("token_range", "no token of the vocabulary", got=answer.tokens)
        logprobs = np.array(answer.logprobs, np.float32)
        versions = np.full(len(tokens), version_of(answer.weights, question.wanted.run), np.int32)
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

    def verified(self, push: WeightPush) -> Mapping[str, str]:
        found = digests(Path(push.directory))
        if found != {entry.name: entry.digest for entry in push.tensors}:
            raise SyncError("files of the push differ from the learner's memory", where=push.directory)
        return found

    async def load(self, http: EngineHttp, delivery: Delivery) -> None:
        push = delivery.push
        try:
            with delivery.keeping:
                label = label_of(push.version, self._run)
                told = await http.post("/load", {"folder": push.directory, "version": label})
                if delivery.expected is not None and told["digests"] != await delivery.expected:
                    raise SyncError("the server read other tensors than the learner wrote", where=http.url)
                if told["weights"] != label:
                    raise SyncError("the server labels its weights with another version", got=told["weights"])
        except EngineLost:
            raise
        except EngineError as error:
            raise SyncError("the server did not load the push", where=push.directory, got=error.got) from error


def digests(folder: Path) -> dict[str, str]:
    """By name: the digest of each tensor in the safetensors files of `folder`."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = xxhash.xxh3_128_hexdigest(data[start + first : start + last])
    return found


class ScriptedServer(ThreadingHTTPServer):
    """The server process: answers by the script with the weights that it was given last."""

    daemon_threads = True

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", options.port), Handler)
        self.options, self.key = options, os.environ[API_KEY_VARIABLE]
        self.weights, self.answered, self.aborts = "none", 0, 0
        self.decoding = "none"
        self.paused = threading.Lock()

    def say(self, asked: Any) -> dict[str, Any]:
        """One answer; the server dies in the middle of the one that `--die-at` names, if there is no file `--died`."""
        with self.paused:  # a push is under way: it waits for the new weights
            weights, aborts, number = self.weights, self.aborts, self.answered
            self.answered += 1
        if number + 1 == self.options.die_at and not self.options.died.exists():
            self.options.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        line = (*SCRIPT[number % len(SCRIPT)], *asked["stop"][:1])
        tokens: list[int] = []
        for token in islice(line, asked["most"]):
            time.sleep(self.options.token_s)
            if self.aborts != aborts:
                break
            tokens.append(token)
        finish = "abort" if self.aborts != aborts else "stop" if tokens == [*line] else "length"
        return {
            "tokens": tokens,
            "logprobs": [LOGPROB] * len(tokens),
            "weights": weights,
            "finish": finish,
            "seen": len(asked["ids"]),
        }

    def score(self, asked: Any) -> dict[str, Any]:
        """Log-probs of tokens, one nat less with each version of the weights that decoding or prefill reads."""
        version = self.decoding if asked["decodes"] else self.weights
        return {"logprobs": [LOGPROB - int(version.partition("-")[0])] * asked["count"]}

    def load(self, asked: Any) -> dict[str, Any]:
        """Read a push."""
        with self.paused:
            found, self.weights = digests(Path(asked["folder"])), str(asked["version"])
        if not self.options.stale or self.decoding == "none":
            self.decoding = self.weights
        print(f"loaded {self.weights}: {len(found)} tensors", flush=True)
        if self.options.misreads:
            found[min(found)] = "damaged"
        return {"digests": found, "weights": self.weights}


class Handler(BaseHTTPRequestHandler):
    """Routes of the server. Everything but `/health` needs the key."""

    server: ScriptedServer

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, {})
        elif self._may():
            self._reply(200, {"weights": self.server.weights, "engine": "script"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may():
            return
        if self.path == "/abort":
            self.server.aborts += 1
        own = self.server
        routes = {"/say": own.say, "/load": own.load, "/score": own.score, "/abort": lambda _: {}}
        self._reply(200, routes[self.path](asked))

    def _may(self) -> bool:
        told = self.headers.get("Authorization", "")
        if hmac.compare_digest(told.encode(), f"Bearer {self.server.key}".encode()):
            return True
        self._reply(401, {"error": "wrong key"})
        return False

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """No line for every answer."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--died", type=Path, help="a file that is made before it dies: another life does not")
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--misreads", action="store_true")
    parser.add_argument("--stale", action="store_true", help="decoding goes on with the first weights")
    print("a life begins", flush=True)
    ScriptedServer(parser.parse_args()).serve_forever()
