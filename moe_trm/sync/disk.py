"""Weight pushes through files, the learner's side: write shards, complete the folder.

A push folder `.../vNNNNNN` holds one safetensors shard per writing rank, the index, config.json, the tokenizer files
and the manifest `push.json`. The manifest is written last: a folder without it is not a push.

The chain of proof: digest of the writer's memory = digest of the file's tensor (read here) -> checksums computed from
those very bytes = checksums that the engine reports of the loaded tensors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from moe_trm.errors import CheckpointError, SyncError
from moe_trm.sync.manifest import TensorEntry, WeightPush
from moe_trm.sync.rounding import Rounding
from moe_trm.sync.shard import write_joined, write_tensors
from moe_trm.sync.tensors import HASH_THREADS, LOT_BYTES, bytes_digest, in_lots, tensor_digest

MANIFEST = "push.json"
INDEX = "model.safetensors.index.json"
KEPT_PUSHES = 2
BUCKET_BYTES = 256 * 2**20
"""Size of a pushed file, about: a rank holds two of these, the one that is written and the next."""

_PUSH_FOLDER = re.compile(r"v(\d+)")
_WEIGHT_FILES = re.compile(r".*\.(safetensors|bin|pt|pth|index\.json)")


def write_shard(path: Path, tensors: Iterable[tuple[str, Tensor]], rounding: Rounding) -> tuple[TensorEntry, ...]:
    """Round, digest from memory, and write one file, whose folder is made. All tensors are held until written.

    Raises `SyncError` where it cannot be written.
    """
    with _writing(path.parent), _Writer(path.parent, rounding) as writer:
        writer.begin(path.name, dict(_rounded(tensors, rounding)))
        return writer.finished()


def write_buckets(
    folder: Path,
    stem: str,
    tensors: Iterable[tuple[str, Tensor]],
    rounding: Rounding,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    lot_bytes: int = LOT_BYTES,
) -> tuple[TensorEntry, ...]:
    """As `write_shard`, in files of about `bucket_bytes`: one is digested and written while the next is made.

    The files are `STEM.safetensors`, `STEM-0001.safetensors`, ...; none where there is no tensor. A file ends with the
    tensor that reaches `bucket_bytes`, and two are held at most. A thread digests `lot_bytes` at once; smaller files
    are made without threads.
    """
    with _writing(folder), _Writer(folder, rounding, lot_bytes) as writer:
        sized = (((name, tensor), tensor.nbytes) for name, tensor in _rounded(tensors, rounding))
        for number, bucket in enumerate(in_lots(sized, bucket_bytes)):
            writer.begin(f"{stem}{f'-{number:04d}' if number else ''}.safetensors", dict(bucket))
        return writer.finished()


@dataclass(frozen=True)
class _Written:
    """A file that is being written, and the digests of its tensors, lot by lot."""

    file: str
    tensors: Mapping[str, Tensor]
    digests: Sequence[Future[dict[str, str]]]
    done: Future[None]


class _Writer:
    """Digests and writes files in other threads, one file after the other; small ones at once."""

    def __init__(self, folder: Path, rounding: Rounding, lot_bytes: int = LOT_BYTES) -> None:
        self._folder, self._rounding, self._lot_bytes = folder, rounding, lot_bytes
        self._hashing, self._disk = ThreadPoolExecutor(HASH_THREADS), ThreadPoolExecutor(1)
        self._pending: deque[_Written] = deque()
        self._entries: list[TensorEntry] = []

    def __enter__(self) -> _Writer:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._hashing, self._disk):
            pool.shutdown(cancel_futures=True)

    def begin(self, file: str, tensors: dict[str, Tensor]) -> None:
        """Start a file, once the one before is finished."""
        if sum(tensor.nbytes for tensor in tensors.values()) < self._lot_bytes:
            self._finish(most_pending=0)
            written = write_joined(self._folder / file, tensors)
            self._enter(file, tensors, {name: bytes_digest(data) for name, data in written.items()})
            return
        lots = in_lots((((name, tensor), tensor.nbytes) for name, tensor in tensors.items()), self._lot_bytes)
        digests = [self._hashing.submit(_digests, lot) for lot in lots]
        done = self._disk.submit(write_tensors, self._folder / file, tensors)
        self._pending.append(_Written(file, tensors, digests, done))
        self._finish(most_pending=1)

    def finished(self) -> tuple[TensorEntry, ...]:
        """Entries of all files, once they are written."""
        self._finish(most_pending=0)
        return tuple(self._entries)

    def _finish(self, most_pending: int) -> None:
        """Wait until all files but the last `most_pending` are written."""
        while len(self._pending) > most_pending:
            written = self._pending.popleft()
            written.done.result()
            digests = {name: digest for lot in written.digests for name, digest in lot.result().items()}
            self._enter(written.file, written.tensors, digests)

    def _enter(self, file: str, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        self._entries += [
            TensorEntry(name, file, self._rounding.dtype_of(name), tuple(tensor.shape), digests[name])
            for name, tensor in tensors.items()
        ]


def _digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors}


def _rounded(tensors: Iterable[tuple[str, Tensor]], rounding: Rounding) -> Iterator[tuple[str, Tensor]]:
    return ((name, rounding.pushed(name, tensor)) for name, tensor in tensors)


def finish_push(directory: str, entries: tuple[TensorEntry, ...], version: int, checkpoint: str) -> WeightPush:
    """Complete the folder `vNNNNNN` of a push whose shards are written, and delete all pushes but the last two.

    The engine gets config.json and tokenizer files of `checkpoint`.

    Raises:
        SyncError: a tensor is pushed twice, a shard is not there, or a file cannot be written.
        CheckpointError: `checkpoint` has no config.json.
    """
    folder = Path(directory)
    weight_map = {entry.name: entry.file for entry in entries}
    if len(weight_map) != len(entries):
        names = [entry.name for entry in entries]
        raise SyncError(
            "a tensor is pushed by two ranks",
            where=directory,
            got=sorted({name for name in names if names.count(name) > 1})[:5],
        )
    absent = sorted(file for file in set(weight_map.values()) if not (folder / file).is_file())
    if absent:
        raise SyncError(
            "shards of the push are missing", where=directory, got=absent, expected="every file that the ranks reported"
        )
    with _writing(folder):
        for stray in folder.glob("*.safetensors"):
            if stray.name not in weight_map.values():
                stray.unlink()
        _copy_companions(Path(checkpoint), folder)
        size = sum((folder / file).stat().st_size for file in set(weight_map.values()))
        _write_whole(folder / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}).encode())
        push = WeightPush(version, directory, entries)
        _write_whole(folder / MANIFEST, msgspec.json.encode(push))
        _delete_old(folder, version)
        return push


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises `SyncError` for a file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise SyncError(
            "a weight push cannot be written",
            where=str(folder),
            got=str(error),
            expected=f"room for {KEPT_PUSHES + 1} copies of the weights in the engine's dtype",
            fix="Make room there, or set sync.dir to a larger folder that the engine sees too. A container's shared "
            "memory is as large as it was started with (docker run --shm-size).",
        ) from error


def _copy_companions(checkpoint: Path, folder: Path) -> None:
    if not (checkpoint / "config.json").is_file():
        raise CheckpointError(
            "no config.json to push", where=str(checkpoint), expected="the checkpoint folder that training started from"
        )
    for path in checkpoint.iterdir():
        if path.is_file() and not _WEIGHT_FILES.fullmatch(path.name):
            data = path.read_bytes()
            _write_whole(folder / path.name, _plain(data) if path.name == "config.json" else data)


def _plain(config: bytes) -> bytes:
    """config.json of pushed tensors, which are plain also where the checkpoint's are FP8 or MXFP4."""
    data = json.loads(config)
    return config if data.pop("quantization_config", None) is None else json.dumps(data, indent=2).encode()


def _write_whole(path: Path, data: bytes) -> None:
    """A reader sees the old file or the whole new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)


def _delete_old(folder: Path, version: int) -> None:
    """Remove sibling pushes, also those that an earlier run of the same name left behind."""
    for sibling in folder.parent.iterdir():
        number = _PUSH_FOLDER.fullmatch(sibling.name)
        if number and not 0 <= version - int(number[1]) < KEPT_PUSHES:
            shutil.rmtree(sibling)
