"""The part of the engine's HTTP interface that weight sync needs, and the checks both methods share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from moe_trm.errors import SyncError
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


async def check_weights(api: EngineApi, expected: Mapping[str, str]) -> None:
    """Raise `SyncError` naming tensors unless every engine rank has loaded exactly the tensors behind `expected`."""
    answer = await api.post("/weights_checker", {"action": "checksum"})
    ranks = answer.get("ranks") or []
    if not ranks:
        raise SyncError(
            "the engine gave no checksums", got=answer.get("message"), expected="one digest per loaded tensor"
        )
    for number, rank in enumerate(ranks):
        compare(expected, rank["checksums"], where=f"engine rank {number}")


def check_can_verify(server: Mapping[str, Any]) -> str:
    """The device whose hash the engine uses; `server` is its `/server_info`.

    Raises `SyncError` when its checksums cannot be predicted.
    """
    size, device = server.get("tp_size", 1), server.get("device", "cpu")
    if size != 1:
        raise SyncError(
            "weight pushes cannot be verified on this engine: its ranks hold slices, and only whole tensors can be "
            "predicted",
            got=f"tensor parallel size {size}",
            expected="1",
            fix="Set rollout.server.tensor_parallel=1, or sync.verify=false and accept unproved weights.",
        )
    if device not in ("cpu", "cuda"):
        raise SyncError(
            "weight pushes cannot be verified on this engine: how this device hashes is not known here",
            got=f"device {device}",
            expected="cpu or cuda",
            fix="Set sync.verify=false and accept unproved weights.",
        )
    return str(device)
