"""Weight pushes by broadcast, the controller's side: it leads the engine through a push and verifies the push.

The learner's side is `moe_trm.sync.distributed`. Source: SGLang 0.5.23, `/init_weights_update_group`,
`/begin_weight_update`, `/update_weights_from_distributed`, `/end_weight_update`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_trm.errors import EngineError, SyncError
from moe_trm.rollout.sglang.api import EngineApi, check_label, check_weights, paused
from moe_trm.rollout.sglang.checksum import EngineChecksums
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.runtime.patience import patient
from moe_trm.sync.distributed import broadcast, buckets_of, join_group, tensors_of
from moe_trm.sync.manifest import Meeting, Share, TensorEntry
from moe_trm.sync.tensors import num_bytes, tensor_digest


@dataclass
class DistributedPush:
    """The controller's end of a broadcast: leads the engine of `engine_ranks` through a push and witnesses it.

    `timeout_s`: longest wait at every broadcast; a loaded machine gets more.
    """

    api: EngineApi
    engine_ranks: int = 1
    timeout_s: float = 300.0
    _groups: dict[str, dist.ProcessGroupGloo] = field(default_factory=dict)

    async def join(self, meetings: Sequence[Meeting]) -> None:
        """Form the groups, one after the other; each sender has to be in `connect` by then.

        Raises `EngineError`, `SyncError`.
        """
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

    async def load(self, label: str, shares: Sequence[Share], shape: EngineShape | None) -> None:
        """Make the engine serve weights under `label`, received from every sender; each has to be in `send` by then.

        `shape`: of the engine, whose checksums are compared; None: they are not.

        Raises:
            SyncError: a tensor differs from its owner's memory, or the engine's tensors or version are not those of the
                push.
            EngineError: the engine cannot be reached.
        """
        names = [entry.name for share in shares for entry in share.entries]
        checksums = EngineChecksums(names, shape) if shape is not None else None
        requests = [(share.meeting.group, bucket) for share in shares for bucket in buckets_of(share)]
        damaged: list[str] = []
        async with paused(self.api):
            await self._succeed("/begin_weight_update", {})
            try:
                for number, (group, bucket) in enumerate(requests):
                    last = number == len(requests) - 1
                    labelled = {"weight_version": label} if last else {}
                    witness = asyncio.create_task(asyncio.to_thread(self._witness, group, bucket, checksums))
                    await self._succeed(
                        "/update_weights_from_distributed",
                        {
                            "names": [entry.name for entry in bucket],
                            "dtypes": [entry.dtype for entry in bucket],
                            "shapes": [list(entry.shape) for entry in bucket],
                            "group_name": group,
                            "load_format": "flattened_bucket",
                            "flush_cache": last,
                            **labelled,
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
                fix=(
                    "Do not train on its samples. Check that senders broadcast in the order they announced, then push "
                    "again."
                ),
            )
        await check_label(self.api, label)
        if checksums is not None:
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
        timeout, size = timedelta(seconds=patient(self.timeout_s)), self.engine_ranks + 2
        store = TCPStore(meeting.address, meeting.port, is_master=False, wait_for_workers=False, timeout=timeout)
        return join_group(store, meeting.group, size - 1, size, timeout)

    def _witness(self, group: str, bucket: Sequence[TensorEntry], checksums: EngineChecksums | None) -> list[str]:
        """Receive one bucket; the names whose bytes are not those the owner digested."""
        damaged = []
        data = torch.empty(sum(map(num_bytes, bucket)), dtype=torch.uint8)
        broadcast(self._groups[group], data)
        for entry, tensor in tensors_of(bucket, data):
            if tensor_digest(tensor) != entry.digest:
                damaged.append(entry.name)
            if checksums is not None:
                checksums.add(entry.name, tensor)
        return damaged
