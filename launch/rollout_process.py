"""The rollout server of a job: `python -m launch.rollout`, as on a machine of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.runtime.owned_process import OwnedProcess
from moe_trm.runtime.python import run_module

READY = b"rollout server ready"
"""The beginning of the line that `launch.rollout` prints once the server generates."""
END_S = 30.0
"""Time for the server to end, which takes SGLang a few seconds, before it is killed."""


def rollout_command(config_path: str, overrides: Sequence[str]) -> list[str]:
    """The command line of the server of a configuration on this host."""
    return run_module("launch.rollout", config_path, *overrides)


class RolloutProcess:
    """The server in a process of its own. A context manager: leaving it ends the server, or its start.

    It tells its errors on standard error itself.

    Args:
        config_path: of the run.
        overrides: likewise.
        api_key: of the server; it travels in the environment, never on a command line.
    """

    def __init__(self, config_path: str, overrides: Sequence[str], api_key: str) -> None:
        environment = {**os.environ, API_KEY_VARIABLE: api_key}
        self._process = OwnedProcess(rollout_command(config_path, overrides), environment, output=subprocess.PIPE)
        os.set_blocking(self._process.output.fileno(), False)
        self._said = b""

    @property
    def ready(self) -> bool:
        """True once the server generates."""
        if READY not in self._said:
            self._said += self._process.output.read() or b""
        return READY in self._said

    @property
    def failed(self) -> int | None:
        """Exit code of a job whose server ended before it was ready; None where it is ready, or still starts."""
        status = self._process.poll()
        return None if status is None or self.ready else abs(status) or 1

    def __enter__(self) -> RolloutProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process, suppress(subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(END_S)
