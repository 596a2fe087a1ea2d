"""Weight pushes through files, the engine's side: verify the files, load them, prove what was loaded.

`moe_trm.sync.disk` has the chain of proof.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from pathlib import Path

import torch

from moe_trm.errors import EngineError, EngineLost, SyncError
from moe_trm.rollout.servers.backend import Digests
from moe_trm.rollout.sglang.api import EngineApi, check_label, check_weights, paused
from moe_trm.rollout.sglang.checksum import EngineChecksums
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.sync.manifest import TensorEntry, WeightPush
from moe_trm.sync.rounding import DTYPES
from moe_trm.sync.shard import Memory, Shard
from moe_trm.sync.tensors import HASH_THREADS, LOT_BYTES, bytes_digest, in_lots, num_bytes


def verified_checksums(push: WeightPush, shape: EngineShape | None, *, lot_bytes: int = LOT_BYTES) -> Digests:
    """Read every tensor once and check it against the manifest, engine tensors side by side in several threads.

    A thread takes about `lot_bytes` at once; a push of one lot needs no threads.

    Returns the checksums that the ranks of an engine of this shape must report, none for an unknown shape. Raises
    `SyncError` naming the tensors whose file differs from the writer's memory.
    """
    names = [entry.name for entry in push.tensors]
    checksums = EngineChecksums(names, shape) if shape is not None else None
    entries = {entry.name: entry for entry in push.tensors}
    with ExitStack() as opened:
        shards = {file: opened.enter_context(_shard(push, file)) for file in sorted({e.file for e in push.tensors})}
        lots = [checksums.parts() if checksums is not None else tuple((name,) for name in names)]
        if sum(shard.num_bytes for shard in shards.values()) >= lot_bytes:
            sized = ((parts, sum(num_bytes(entries[name]) for name in parts)) for parts in lots[0])
            lots = [tuple(lot) for lot in in_lots(sized, lot_bytes)]

        def damaged_in(lot: Iterable[Sequence[str]]) -> list[str]:
            memory, names = Memory(), chain.from_iterable(lot)
            return [name for name in names if not _take(push, entries[name], shards, checksums, memory)]

        damaged_lists: Iterable[list[str]] = map(damaged_in, lots)
        if len(lots) > 1 and HASH_THREADS > 1:
            damaged_lists = opened.enter_context(ThreadPoolExecutor(HASH_THREADS)).map(damaged_in, lots)
        damaged = sorted(chain.from_iterable(damaged_lists))
    if damaged:
        raise SyncError(
            "files of the push differ from the learner's memory",
            where=push.directory,
            got=", ".join(damaged[:5]) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""),
            expected=f"{len(push.tensors)} tensors with the digests of the manifest",
            fix="Look for damaged storage, a full disk, or another writer of this folder; then push again.",
        )
    return checksums.result() if checksums is not None else ()


def _take(
    push: WeightPush,
    entry: TensorEntry,
    shards: Mapping[str, Shard],
    checksums: EngineChecksums | None,
    memory: Memory,
) -> bool:
    """Add the tensor to the checksums. False where it differs from the manifest.

    All before it in its engine tensor are added, so that nothing of `memory` is kept.
    """
    try:
        data, dtype, shape = shards[entry.file].read(entry.name, memory)
    except (ValueError, OSError) as error:
        raise _unreadable(push, entry.file, error) from error
    if checksums is not None and not checksums.add_bytes(entry.name, data, dtype):
        checksums.add(entry.name, torch.frombuffer(data, dtype=dtype).reshape(shape))
    same_kind = shape == entry.shape and dtype is DTYPES[entry.dtype]
    return same_kind and bytes_digest(data) == entry.digest


def _shard(push: WeightPush, file: str) -> Shard:
    try:
        return Shard(Path(push.directory) / file)
    except (ValueError, OSError) as error:
        raise _unreadable(push, file, error) from error


def _unreadable(push: WeightPush, file: str, error: Exception) -> SyncError:
    return SyncError(
        "a shard of the push cannot be read",
        where=str(Path(push.directory) / file),
        got=str(error),
        expected="the shard as written",
    )


async def load_folder(
    api: EngineApi,
    push: WeightPush,
    expected: Awaitable[Digests] | None,
    keeping: AbstractContextManager[None] | None = None,
    *,
    label: str | None = None,
) -> None:
    """Make the engine serve `push` with an empty prefix cache.

    Args:
        expected: of `verified_checksums`, which the engine must report; None, or of no rank: not asked.
        keeping: entered once the engine is paused, and left when its weights are proved and it may go on.
        label: of these weights; None: the version.

    Raises `SyncError` where the engine's tensors or label are not those of the push, or it refuses to load them,
    `EngineLost` where it cannot be reached or fails.
    """
    label = str(push.version) if label is None else label
    body = {
        "model_path": push.directory,
        "weight_version": label,
        "flush_cache": True,
        # SGLang would take the format it was started with, which is `dummy` beside a quantised checkpoint.
        "load_format": "auto",
    }
    try:
        async with paused(api):
            with keeping or nullcontext():
                answer = await api.post("/update_weights_from_disk", body)
                if not answer.get("success"):
                    raise SyncError("the engine did not load the push", where=push.directory, got=answer.get("message"))
                await check_label(api, label)
                if expected is not None and (checksums := await expected):
                    await check_weights(api, checksums)
    except EngineLost:
        raise
    except EngineError as error:
        raise SyncError(
            "the engine did not load the push, or does not say what it holds",
            where=push.directory,
            got=error.got,
            fix=error.fix,
        ) from error
