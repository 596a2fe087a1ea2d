"""Rollout servers lost and back: each change once, and `servers.jsonl`, which keeps them for the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from moe_trm.observe.sinks import Sink
from moe_trm.run_folder.run import SERVERS_FILE
from moe_trm.runtime.private import append_private
from moe_trm.types import ServerState


@dataclass(frozen=True)
class ServerChange:
    """A server that went out of service (`lost`) or came back, the seconds out of service so far, and why it went."""

    url: str
    lost: bool
    seconds: float
    why: str

    def __str__(self) -> str:
        if self.lost:
            return f"rollout server {self.url} is out of service: {self.why}"
        return f"rollout server {self.url} is back after about {self.seconds:.0f} s ({self.why})"


WAITS_S = 30.0
"""Pause between two lines about a server that is awaited."""


class ServerWaits:
    """Lines about servers that have not answered yet: when the wait begins, then now and again."""

    def __init__(self) -> None:
        self._reported_s: dict[str, float] = {}

    def of(self, states: Sequence[ServerState]) -> list[str]:
        """Lines that are due at this look."""
        lines = []
        for state in states:
            waited_s, reported_s = state.awaited_s, self._reported_s.get(state.url)
            if waited_s is not None and (reported_s is None or waited_s - reported_s > WAITS_S):
                self._reported_s[state.url] = waited_s
                lines.append(waiting_for(state))
        return lines


def waiting_for(state: ServerState) -> str:
    """Name, age and longest age of a wait."""
    return f"waiting for rollout server {state.url}: {state.awaited_s or 0:.0f} s of at most {state.limit_s:.0f} s"


class ServerChanges:
    """Remembers which servers were out of service at the last look."""

    def __init__(self) -> None:
        self._lost: dict[str, ServerState] = {}

    def of(self, states: Sequence[ServerState]) -> list[ServerChange]:
        """Changes since the last look. One that was lost and came back in between is not seen."""
        changes = []
        for state in states:
            earlier = self._lost.get(state.url)
            if state.lost_s is not None:
                self._lost[state.url] = state
                if earlier is None:
                    changes.append(ServerChange(state.url, True, state.lost_s, state.why))
            elif earlier is not None:
                del self._lost[state.url]
                changes.append(ServerChange(state.url, False, earlier.lost_s or 0.0, earlier.why))
        return changes


class ServerLog(Sink):
    """`servers.jsonl`: one object for each change, made with the first."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._changes = run_dir / SERVERS_FILE, ServerChanges()

    def servers(self, states: Sequence[ServerState]) -> None:
        changes = self._changes.of(states)
        if changes:
            with append_private(self._path) as file:
                for change in changes:
                    file.write(orjson.dumps({"time/unix_s": time.time(), **asdict(change)}) + b"\n")
