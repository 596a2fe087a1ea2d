"""The part of the engine's HTTP interface that weight sync needs, and the checks both methods share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from moe_trm.errors import SyncError
from moe_trm.rollout.servers.backend import Digests
from moe_trm.rollout.sglang.checksum import compare


class EngineApi(Protocol):
    """Authenticated requests to one engine. Both raise `EngineError` for anything but success."""

    async def get(self, path: str) -> Any:
        """Parsed JSON of a GET."""

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        """Parsed JSON of a POST."""


@asynccontextmanager
async def paused(api: EngineApi) -> AsyncIterator[None]:
    """Inside, the engine generates nothing. What still runs, such as a health check's token, goes back to its queue.

    Weights are given inside, because the engine refuses to flush its prefix cache while anything runs. Raises
    `EngineError`; the engine goes on however the block ends, if it can be reached.
    """
    await api.post("/pause_generation", {"mode": "retract"})
    try:
        yield
    finally:
        await api.post("/continue_generation", {})


async def check_label(api: EngineApi, label: str) -> None:
    """Raise `SyncError` unless the engine labels its weights so (`ownership.label_of`).

    Necessary, and proof of nothing: see `check_weights`.
    """
    served = (await api.get("/model_info"))["weight_version"]
    if served != label:
        raise SyncError("the engine labels its weights with another version", got=served, expected=label)


async def check_weights(api: EngineApi, expected: Digests) -> None:
    """Raise `SyncError` naming rank and tensors unless every rank of the engine holds exactly the expected tensors.

    With attention in data-parallel groups, every group reports all ranks.
    """
    reported = await reported_weights(api)
    silent = sorted({*range(len(expected))} - {rank for rank, _ in reported})
    if silent or not reported:
        raise SyncError(
            "ranks of the engine gave no checksums", got=f"none of ranks {silent}", expected=f"all {len(expected)}"
        )
    for rank, checksums in reported:
        compare(expected[rank] if rank < len(expected) else {}, checksums, where=f"engine rank {rank}")


async def reported_weights(api: EngineApi) -> list[tuple[int, Mapping[str, str]]]:
    """The number of each rank of the engine, and the checksums of the tensors that it holds.

    Raises `EngineError`, `SyncError`.
    """
    answer = await api.post("/weights_checker", {"action": "checksum"})
    ranks = answer.get("ranks") or []
    if not ranks:
        raise SyncError(
            "the engine gave no checksums", got=answer.get("message"), expected="one digest per loaded tensor"
        )
    return [(rank["parallelism_info"][0]["tp_rank"], rank["checksums"]) for rank in ranks]
