"""A stand-in of SGLang that lends its memory, and dies where SGLang 0.5.23 does, or where it may.

It dies of every request but `/resume_memory_occupation` while its memory is lent: a health check makes a token with
weights that are unmapped (`http_server.py`, `health_generate`). It dies of a release while anything runs, or waits
without a pause (`weight_updater.py`, `assert self.is_fully_idle`), of a tag that is not lent (`offload_tags.remove`),
and of a cache that comes back before the weights. The file named by LENDER_LOG gets every request, and what it died of.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

WEIGHTS, CACHE = "weights", "kv_cache"
HEALTH_S = 20.0
"""Longest wait of a health check for its token."""


class Lender(ThreadingHTTPServer):
    """The server process."""

    daemon_threads = True

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__((options.host, options.port), Handler)
        self.token_s, self.log = options.token_s, Path(os.environ["LENDER_LOG"])
        self.label, self.is_released = "default", list[str]()
        self.running, self.waiting, self.paused = 0, 0, False
        self.changed = threading.Condition()
        self.note("begins")

    def note(self, line: str) -> None:
        with self.log.open("a") as log:
            log.write(line + "\n")

    def die(self, why: str) -> None:
        """As the whole server does when its scheduler raises."""
        self.note(f"died: {why}")
        os._exit(1)

    def health(self) -> int:
        """Make a token, once nothing pauses the engine."""
        with self.changed:
            self.waiting += 1
            going_on = self.changed.wait_for(lambda: not self.paused, HEALTH_S)
            self.waiting -= 1
            if not going_on:
                return 503
            self.running += 1
        if self.token_s:
            self.note("a token begins")
        time.sleep(self.token_s)
        with self.changed:
            self.running -= 1
            self.changed.notify_all()
        return 200

    def flush(self, timeout_s: float) -> int:
        """200 once nothing runs or waits; 400 when that takes longer than `timeout_s`."""
        with self.changed:
            idle = self.changed.wait_for(lambda: not self.running and (self.paused or not self.waiting), timeout_s)
        return 200 if idle else 400

    def take(self, path: str, body: Any) -> dict[str, Any]:
        """One request that changes its state."""
        with self.changed:
            if path == "/release_memory_occupation":
                if self.running or (self.waiting and not self.paused):
                    self.die("release while something runs")
                self.is_released += body["tags"]
            elif path == "/resume_memory_occupation":
                for tag in body["tags"]:
                    if tag not in self.is_released or (tag == CACHE and WEIGHTS in self.is_released):
                        self.die(f"resume of {tag} while {self.is_released} are lent")
                    self.is_released.remove(tag)
            elif path in ("/pause_generation", "/continue_generation"):
                self.paused = path == "/pause_generation"
            elif path == "/update_weights_from_disk":
                self.label = body["weight_version"]
            self.changed.notify_all()
        return {"success": True}


class Handler(BaseHTTPRequestHandler):
    """Notes a request, and dies of it where SGLang would."""

    server: Lender

    def do_GET(self) -> None:
        self._begin()
        if self.path in ("/health", "/health_generate"):
            self._reply(self.server.health(), {})
        else:
            self._reply(200, {"weight_version": self.server.label})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        self._begin(str(body.get("tags", "")))
        parts = urlsplit(self.path)
        if parts.path == "/flush_cache":
            self._reply(self.server.flush(float(parse_qs(parts.query).get("timeout", ["0"])[0])), {})
        else:
            self._reply(200, self.server.take(parts.path, body))

    def _begin(self, tags: str = "") -> None:
        self.server.note(f"{self.path} {tags}".strip())
        if self.server.is_released and self.path != "/resume_memory_occupation":
            self.server.die(f"{self.path} while {self.server.is_released} are lent")

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """No line for every request."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds of a health check's token")
    Lender(parser.parse_known_args()[0]).serve_forever()
