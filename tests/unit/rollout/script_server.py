"""The server of `scripted_backend.py`: it answers by a script, reads every pushed tensor and says what it read.

`rollout.server.extra_args` tells it what to do wrong. It imports nothing of ours, so that it starts at once.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import signal
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

SCRIPT = ((5, 6), (7,), (5, 5, 6), (6, 7, 5, 4))
"""The answers in turn; the request's stop token comes after each."""
LOGPROB = -0.5


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
        super().__init__((options.host, options.port), Handler)
        self.options, self.key = options, os.environ[options.key_in]
        self.weights, self.answered, self.aborts = "none", 0, 0
        self.decoding = "none"
        self.paused = threading.RLock()

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
            if tokens and self.options.slow_from <= number < self.options.slow_to:
                print(f"answer {number}: {len(tokens)} so far", flush=True)
                self.take_time(aborts)
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

    def take_time(self, aborts: int) -> None:
        """The time between two tokens, or less if answers are aborted meanwhile."""
        end = time.monotonic() + self.options.token_s
        while self.aborts == aborts and (rest := end - time.monotonic()) > 0:
            time.sleep(min(rest, 0.02))

    def score(self, asked: Any) -> dict[str, Any]:
        """Log-probs of tokens, one nat less with each version of the weights that decoding or prefill reads."""
        version = self.decoding if asked["decodes"] else self.weights
        return {"logprobs": [LOGPROB - int(version.partition("-")[0])] * asked["count"]}

    def load(self, asked: Any) -> dict[str, Any]:
        """Read a push."""
        with self.paused:
            print(f"loading {asked['version']}", flush=True)
            time.sleep(self.options.load_s if self.weights != "none" else 0.0)
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
        # Samples that wait for a push are answered, and the server dies of them, once the push has its answer.
        with own.paused if self.path == "/load" else nullcontext():
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
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key-in", required=True, help="the environment variable that has the key")
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--died", type=Path, help="a file that is made before it dies: another life does not")
    parser.add_argument("--token-s", type=float, default=0.0, help="time between two tokens")
    parser.add_argument("--slow-from", type=int, default=0, help="answers before this one take no time")
    parser.add_argument("--slow-to", type=int, default=1 << 60, help="this one takes none either, nor do later ones")
    parser.add_argument("--load-s", type=float, default=0.0, help="duration of every push but the first")
    parser.add_argument("--misreads", action="store_true")
    parser.add_argument("--stale", action="store_true", help="decoding goes on with the first weights")
    parser.add_argument("--begins", type=Path, help="it listens once this file is there")
    parsed = parser.parse_args()
    print("a life begins", flush=True)
    while parsed.begins is not None and not parsed.begins.exists():
        time.sleep(0.02)
    ScriptedServer(parsed).serve_forever()
