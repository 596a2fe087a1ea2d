"""Errors with which a server, all servers, or one sample is given up."""

from __future__ import annotations

from collections.abc import Iterable

from moe_trm.errors import EngineError, EngineLost, RecordRejected
from moe_trm.rollout.servers.use_proof import ServerUnfit


def too_slow(url: str, loads: int) -> ServerUnfit:
    """Of a server whose `loads` loads in a row ended when newer weights were there."""
    return ServerUnfit(
        "the rollout server is too slow for the weight pushes",
        where=url,
        got=f"{loads} loads in a row that ended after the next push",
        expected="a load that is proved before the next push",
        fix="Look at what slows this server or its disk down. pipeline.push_every gives it more time.",
    )


def none_came_back(urls: Iterable[str], patience_s: float) -> EngineError:
    """Of a fleet without a server for `patience_s`."""
    return EngineError(
        "no rollout server came back",
        where=", ".join(urls),
        got=f"none within {patience_s:g} s",
        expected="a server that generates",
        fix="Look into the server's log. rollout.recovery_timeout_s says how long to wait.",
    )


def failed_everywhere(last_error: EngineLost) -> RecordRejected:
    """Of a sample that was asked for too often; `last_error` is how it failed last."""
    return RecordRejected(
        "engine_failed",
        "the rollout servers failed on this sample every time it was asked for",
        where=last_error.where,
        got=f"{last_error.what}: {last_error.got}",
        expected="an answer",
        fix="Look into the server's log; raise rollout.timeout_s if it is only slow.",
    )
