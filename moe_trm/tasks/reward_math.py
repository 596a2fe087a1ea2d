"""Mathematical equality of an answer with the expected one, decided by math-verify in a helper process."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

from moe_trm.errors import ConfigError, RecordRejected

_LONGEST = 400
"""Characters of an answer that are looked at, from its end; nobody writes a final answer longer than that."""


class MathVerify:
    """`1.0` when the text after the last `#` (the whole text without one) equals the expected answer, else `0.0`.

    Safe on any thread and beside an event loop; one question takes milliseconds, at most `patience_s` seconds. The helper process
    starts with the first question, and again after one that had to be ended.
    """

    def __init__(self, *, timeout_s: int = 3, patience_s: float = 15.0, startup_s: float = 60.0) -> None:
        """`timeout_s` bounds each of math-verify's own steps. Raises `ConfigError` when math-verify is not installed."""
        if find_spec("math_verify") is None:
            raise ConfigError(
                "math-verify is not installed",
                where="task.reward",
                got="math_verify",
                expected="exact, or math-verify installed",
                fix="install the `cpu` extra, or math-verify with its antlr extra",
            )
        self._timeout_s, self._patience_s, self._startup_s = timeout_s, patience_s, startup_s
        self._worker: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __call__(self, text: str, answer: str) -> float:
        """Raises `RecordRejected`: `reward_timeout` when no decision comes in time, `reward_error` when the expected answer is not mathematical."""
        final = text.rpartition("#")[2].strip().partition("\n")[0] if "#" in text else text
        equal = self._ask({"answer": answer, "text": final[-_LONGEST:], "timeout_s": self._timeout_s})
        if equal is None:
            raise RecordRejected(
                "reward_error",
                "the expected answer is not mathematical",
                got=repr(answer),
                expected="a number or an expression",
                fix="correct the prompt file, or set task.reward=exact",
            )
        return float(bool(equal))

    def close(self) -> None:
        """End the helper process."""
        with self._lock:
            self._end()

    def _ask(self, question: dict[str, object]) -> object:
        with self._lock:
            patience_s = self._patience_s
            if self._worker is None or self._worker.poll() is not None:
                self._end()
                self._worker = subprocess.Popen(
                    [sys.executable, "-m", "moe_trm.tasks.math_worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                )
                patience_s += self._startup_s
            try:
                line = self._exchange(self._worker, json.dumps(question).encode() + b"\n", patience_s)
            except BrokenPipeError:
                line = b""
            if not line:
                self._end()
                raise RecordRejected(
                    "reward_timeout",
                    "math-verify gave no decision",
                    got=str(question["text"]),
                    expected=f"a decision within {patience_s:.0f} s",
                )
            return json.loads(line)["equal"]

    def _exchange(self, worker: subprocess.Popen[bytes], question: bytes, patience_s: float) -> bytes:
        """The reply line, or nothing when there is none in time or the process ended."""
        assert worker.stdin is not None
        assert worker.stdout is not None
        deadline, reply = time.monotonic() + patience_s, b""
        worker.stdin.write(question)
        while not reply.endswith(b"\n"):
            ready, _, _ = select.select([worker.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = worker.stdout.read(4096) if ready else b""
            if not part:
                return b""
            reply += part
        return reply

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
            for pipe in (self._worker.stdin, self._worker.stdout):
                if pipe is not None:
                    pipe.close()
            self._worker = None
