"""Weight pushes through files, the engine's side: verify the files, load them, prove what was loaded.

The chain of proof is that of `moe_trm.sync.disk`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moe_trm.errors import EngineError, EngineLost, SyncError
from moe_trm.rollout.sglang.api import EngineApi, check_version, check_weights, paused
from moe_trm.rollout.sglang.checksum import EngineChecksums
from moe_trm.sync.manifest import WeightPush
from moe_trm.sync.rounding import DTYPES
from moe_trm.sync.shard import read_tensors
from moe_trm.sync.tensors import tensor_digest


def verified_checksums(push: WeightPush, dtype: str, device: str = "cpu") -> dict[str, str]:
    """Read every tensor once and check it against the manifest.

    Returns the checksums that an engine in `dtype` on `device` must report. Raises `SyncError` naming the tensors whose
    file differs from the writer's memory.
    """
    checksums = EngineChecksums((entry.name for entry in push.tensors), dtype, device)
    damaged: list[str] = []
    for file in sorted({entry.file for entry in push.tensors}):
        path = Path(push.directory) / file
        entries = {entry.name: entry for entry in push.tensors if entry.file == file}
        try:
            for name, tensor in read_tensors(path, entries):
                entry = entries[name]
                if (
                    tuple(tensor.shape) != entry.shape
                    or tensor.dtype != DTYPES[entry.dtype]
                    or tensor_digest(tensor) != entry.digest
                ):
                    damaged.append(name)
                checksums.add(name, tensor)
        except (ValueError, OSError) as error:
            raise SyncError(
                "a shard of the push cannot be read", where=str(path), got=str(error), expected="the shard as written"
            ) from error
    if damaged:
        raise SyncError(
            "files of the push differ from the learner's memory",
            where=push.directory,
            got=", ".join(damaged[:5]) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""),
            expected=f"{len(push.tensors)} tensors with the digests of the manifest",
            fix="Look for damaged storage, a full disk, or another writer of this folder; then push again.",
        )
    return checksums.result()


async def load_folder(api: EngineApi, push: WeightPush, expected: Mapping[str, str] | None) -> None:
    """Make the engine serve `push` with an empty prefix cache.

    `expected`: of `verified_checksums`, which the engine must report; None: not asked.

    Raises:
        SyncError: the engine's tensors or its version label are not those of the push, or it refuses to load them.
        EngineLost: the engine cannot be reached, or fails.
    """
    body = {
        "model_path": push.directory,
        "weight_version": str(push.version),
        "flush_cache": True,
        # SGLang would take the format it was started with, which is `dummy` beside a quantised checkpoint.
        "load_format": "auto",
    }
    try:
        async with paused(api):
            answer = await api.post("/update_weights_from_disk", body)
    except EngineLost:
        raise
    except EngineError as error:
        raise SyncError(
            "the engine did not load the push", where=push.directory, got=error.got, fix=error.fix
        ) from error
    if not answer.get("success"):
        raise SyncError("the engine did not load the push", where=push.directory, got=answer.get("message"))
    await check_version(api, push.version)
    if expected is not None:
        await check_weights(api, expected)
