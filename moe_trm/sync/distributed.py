"""Weight pushes by broadcast: every sending rank has its own group with the engine, so that owners of experts send their own tensors.

Ranks of one group: 0 the sender, 1 to E the engine's ranks, E + 1 the witness, which runs beside the controller. The witness receives the same
broadcasts as the engine, compares each tensor with the digest its owner took from memory, and computes from it what the engine's
`/weights_checker` must report. So a push is proved as on disk: memory = wire = what the engine holds.

Source: SGLang 0.5.23, `/init_weights_update_group`, `/begin_weight_update`, `/update_weights_from_distributed`, `/end_weight_update`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.errors import EngineError, SyncError
from moe_trm.sync.api import EngineApi, check_version, check_weights
from moe_trm.sync.checksum import DTYPES, EngineChecksums, pushed_dtype, tensor_digest
from moe_trm.sync.manifest import Meeting, Share, TensorEntry

BUCKET_BYTES = 256 * 2**20
"""Most bytes that one request announces: the engine allocates them all before it loads them."""


class Sender:
    """A learner rank's end: broadcasts the tensors it owns.

    Args:
        group: a name that no other sender of this engine uses.
        address: of this machine, as the engine and the controller reach it.
        engine_ranks: tensor parallel size of the engine.
        timeout_s: longest wait for the others, at every broadcast.
    """

    def __init__(self, group: str, address: str = "127.0.0.1", engine_ranks: int = 1, timeout_s: float = 300.0) -> None:
        self._size, self._timeout = engine_ranks + 2, timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)  # type: ignore[attr-defined]
        self.meeting = Meeting(group, address, self._store.port)

    def connect(self) -> None:
        """Form the group; blocks until engine and witness have joined."""
        self._group = _gloo(self._store, self.meeting.group, 0, self._size, self._timeout)

    def send(self, tensors: Iterable[tuple[str, Tensor]], dtype: str) -> None:
        """Broadcast in the order of the announced entries, cast to the engine's `dtype`. Blocks while the engine receives."""
        for name, tensor in tensors:
            _broadcast(self._group, tensor.detach().to("cpu", DTYPES[pushed_dtype(name, dtype)]).contiguous())


def announce(tensors: Iterable[tuple[str, Tensor]], dtype: str) -> tuple[TensorEntry, ...]:
    """The manifest of what `Sender.send` will broadcast, digested from memory after the cast."""
    dtypes = ((name, tensor, pushed_dtype(name, dtype)) for name, tensor in tensors)
    return tuple(
        TensorEntry(name, "", own, tuple(tensor.shape), tensor_digest(tensor.detach().to("cpu", DTYPES[own])))
        for name, tensor, own in dtypes
    )


@dataclass
class DistributedPush:
    """The controller's end: leads the engine through a push and witnesses it.

    Args:
        api: requests to the engine.
        engine_ranks: its tensor parallel size.
        timeout_s: longest wait for the others, at every broadcast.
        device: where the engine holds its tensors.
    """

    api: EngineApi
    engine_ranks: int = 1
    timeout_s: float = 300.0
    device: str = "cpu"
    _groups: dict[str, dist.ProcessGroupGloo] = field(default_factory=dict)

    async def join(self, meetings: Sequence[Meeting]) -> None:
        """Form the groups, one after the other; each sender has to be in `connect` by then. Raises `EngineError`, `SyncError`."""
        for meeting in meetings:
            witness = asyncio.create_task(asyncio.to_thread(self._join_as_witness, meeting))
            answer = await self.api.post(
                "/init_weights_update_group",
                {
                    "master_address": meeting.address,
                    "master_port": meeting.port,
                    "rank_offset": 1,
                    "world_size": self.engine_ranks + 2,
                    "group_name": meeting.group,
                    "backend": "gloo",
                },
            )
            if not answer.get("success"):
                raise SyncError(
                    "the engine did not join a weight group", where=meeting.group, got=answer.get("message")
                )
            self._groups[meeting.group] = await witness

    async def load(self, version: int, shares: Sequence[Share], *, dtype: str, verify: bool) -> None:
        """Make the engine serve `version`, received from every sender in turn; each has to be in `send` by then.

        Raises:
            SyncError: a tensor differs from its owner's memory, or the engine's tensors or version are not those of the push.
            EngineError: the engine cannot be reached.
        """
        checksums = EngineChecksums((entry.name for share in shares for entry in share.entries), dtype, self.device)
        requests = list(
            chain.from_iterable(
                ((share.meeting.group, bucket) for bucket in _buckets(share.entries)) for share in shares
            )
        )
        damaged: list[str] = []
        await self._succeed("/begin_weight_update", {})
        try:
            for number, (group, bucket) in enumerate(requests):
                last = number == len(requests) - 1
                label = {"weight_version": str(version)} if last else {}
                witness = asyncio.create_task(asyncio.to_thread(self._witness, group, bucket, checksums))
                await self._succeed(
                    "/update_weights_from_distributed",
                    {
                        "names": [entry.name for entry in bucket],
                        "dtypes": [entry.dtype for entry in bucket],
                        "shapes": [list(entry.shape) for entry in bucket],
                        "group_name": group,
                        "flush_cache": last,
                        **label,
                    },
                )
                damaged += await witness
        finally:
            await self._succeed("/end_weight_update", {})
        if damaged:
            raise SyncError(
                "tensors changed between the learner's memory and the engine",
                got=", ".join(damaged[:5]) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""),
                expected="the digests of the manifest",
                fix="Do not train on its samples. Check that senders broadcast in the order they announced, then push again.",
            )
        await check_version(self.api, version)
        if verify:
            await check_weights(self.api, checksums.result())

    async def close(self) -> None:
        """Dissolve the groups on the engine."""
        for group in self._groups:
            await self.api.post("/destroy_weights_update_group", {"group_name": group})
        self._groups.clear()

    async def _succeed(self, path: str, body: dict[str, object]) -> None:
        try:
            answer = await self.api.post(path, body)
        except EngineError as error:
            raise SyncError(
                "the engine refused a step of the push", where=path, got=error.got, fix=error.fix
            ) from error
        if not answer.get("success"):
            raise SyncError("the engine refused a step of the push", where=path, got=answer.get("message"))

    def _join_as_witness(self, meeting: Meeting) -> dist.ProcessGroupGloo:
        timeout, size = timedelta(seconds=self.timeout_s), self.engine_ranks + 2
        store = dist.TCPStore(meeting.address, meeting.port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
        return _gloo(store, meeting.group, size - 1, size, timeout)

    def _witness(self, group: str, bucket: Sequence[TensorEntry], checksums: EngineChecksums) -> list[str]:
        """Receive one bucket; the names whose bytes are not those the owner digested."""
        damaged = []
        for entry in bucket:
            tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            _broadcast(self._groups[group], tensor)
            if tensor_digest(tensor) != entry.digest:
                damaged.append(entry.name)
            checksums.add(entry.name, tensor)
        return damaged


def _buckets(entries: Sequence[TensorEntry]) -> Iterator[list[TensorEntry]]:
    bucket: list[TensorEntry] = []
    size = 0
    for entry in entries:
        entry_bytes = torch.Size(entry.shape).numel() * DTYPES[entry.dtype].itemsize
        if bucket and size + entry_bytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += entry_bytes
    if bucket:
        yield bucket


def _gloo(store: Any, group: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A group that meets the engine's: the same three nested key prefixes that `init_custom_process_group` and torch give it there.

    Made from the backend class, because torch's registry of groups knows only subgroups of one world, and engine and learner are two.
    """
    inner = dist.PrefixStore("cpu/", dist.PrefixStore(f"{group}/", dist.PrefixStore(group, store)))  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(inner, rank, size, timeout)


def _broadcast(group: dist.ProcessGroupGloo, tensor: Tensor) -> None:
    """From rank 0, in place."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()  # type: ignore[attr-defined]
