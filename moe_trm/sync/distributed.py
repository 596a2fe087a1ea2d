"""Weight pushes by broadcast.

Every sending rank has its own group with the engine, so owners of experts send their own tensors. Tensors travel in
buckets: one buffer of bytes, in which they follow each other.

Rank 0 of a group is the sender, the others receive. vLLM's worker digests what it receives, as it does with a folder.
SGLang's ranks are 1 to E, and E + 1 is a witness, which runs beside the controller. The witness receives the same
broadcasts as the engine. It compares each tensor with the digest its owner took from memory. From the tensor it
computes what SGLang's `/weights_checker` must report. So a push is proved as on disk: memory = wire = the engine's
tensors.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from moe_trm.runtime.patience import patient
from moe_trm.sync.manifest import Meeting, Share, TensorEntry
from moe_trm.sync.rounding import DTYPES, Rounding
from moe_trm.sync.tensors import num_bytes, tensor_digest

BUCKET_BYTES = 256 * 2**20
"""Size of a broadcast, about: sender, engine and witness hold one each, and the engine the tensor that it loads."""

T = TypeVar("T")


class Sender:
    """A learner rank's end: broadcasts the tensors it owns, in a group whose name no other sender of this engine uses.

    `receivers`: how many others are in the group (`EngineTraits.broadcast_receivers`). `address`: of this machine, as
    the engine and the controller reach it. `timeout_s`: longest wait for the others, at every broadcast; a loaded
    machine gets more. `bucket_bytes`: as of `Meeting`.
    """

    def __init__(
        self,
        group: str,
        address: str = "127.0.0.1",
        receivers: int = 2,
        timeout_s: float = 300.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._size, self._timeout = receivers + 1, timedelta(seconds=patient(timeout_s))
        # At this address only: by itself the store listens on all interfaces.
        with listening(address) as listener:
            port = listener.getsockname()[1]
            self._store = TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=self._timeout,
                master_listen_fd=listener.detach(),
            )
        self.meeting = Meeting(group, address, self._store.port, bucket_bytes)

    def connect(self) -> None:
        """Form the group; blocks until engine and witness have joined."""
        self._group = join_group(self._store, self.meeting.group, 0, self._size, self._timeout)

    def send(self, tensors: Iterable[tuple[str, Tensor]], rounding: Rounding) -> None:
        """Broadcast in the order of the announced entries, rounded alike.

        Blocks while the engine receives.
        """
        pushed = (rounding.pushed(name, tensor) for name, tensor in tensors)
        sized = ((tensor, tensor.nbytes, tensor.itemsize) for tensor in pushed)
        for bucket in in_buckets(sized, self.meeting.bucket_bytes):
            broadcast(self._group, torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in bucket]))


def listening(address: str) -> socket.socket:
    """A socket that listens at a free port of `address`."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    made.bind((address, 0))
    made.listen()
    return made


def in_buckets(items: Iterable[tuple[T, int, int]], most: int) -> Iterator[list[T]]:
    """Items with their bytes and the width of their elements, in broadcasts of `most` bytes at most, or of one item.

    An item whose bytes would begin at no multiple of its width begins a bucket.
    """
    bucket: list[T] = []
    size = 0
    for item, item_bytes, width in items:
        if bucket and (size + item_bytes > most or size % width):
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += item_bytes
    if bucket:
        yield bucket


def buckets_of(share: Share) -> Iterator[list[TensorEntry]]:
    """The broadcasts of a share, as its sender makes them."""
    sized = ((entry, num_bytes(entry), DTYPES[entry.dtype].itemsize) for entry in share.entries)
    return in_buckets(sized, share.meeting.bucket_bytes)


def tensors_of(bucket: Sequence[TensorEntry], data: Tensor) -> Iterator[tuple[TensorEntry, Tensor]]:
    """The tensors of a bucket, views of its bytes."""
    for entry, part in zip(bucket, torch.split(data, [num_bytes(entry) for entry in bucket]), strict=True):
        yield entry, part.view(DTYPES[entry.dtype]).reshape(entry.shape)


def announce(tensors: Iterable[tuple[str, Tensor]], rounding: Rounding) -> tuple[TensorEntry, ...]:
    """The manifest of the broadcast of `Sender.send`, digested from memory after the rounding."""
    return tuple(
        TensorEntry(
            name, "", rounding.dtype_of(name), tuple(tensor.shape), tensor_digest(rounding.pushed(name, tensor))
        )
        for name, tensor in tensors
    )


def join_group(store: Any, group: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A group that meets the engine's.

    It has the three nested key prefixes of `init_custom_process_group` and torch there.

    Made from the backend class: torch's registry of groups knows only subgroups of one world, but engine and learner
    are two.
    """
    inner = PrefixStore("cpu/", PrefixStore(f"{group}/", PrefixStore(group, store)))
    return dist.ProcessGroupGloo(inner, rank, size, timeout)


def broadcast(group: dist.ProcessGroupGloo, tensor: Tensor) -> None:
    """From rank 0, in place."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()  # type: ignore[attr-defined]
