"""The folder of a run's checkpoints: `step-NNNNNN/` each, complete or absent, the last few kept.

A checkpoint is written into `step-NNNNNN.partial` and renamed when every file is on disk and `manifest.json` names each
with its size and SHA-256. What a later start makes obsolete (steps after the one it begins at) is set aside into
`superseded/`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moe_trm import __version__
from moe_trm.errors import CheckpointError

FORMAT = "moe-trm-checkpoint"
FORMAT_VERSION = 2
STATE_FILE = "state.msgpack"
_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{6,})")
_FILE = re.compile(r"rank-\d{5}\.safetensors|state\.msgpack")
_MANIFEST_LIMIT_BYTES = 64 << 20


class FileEntry(msgspec.Struct, frozen=True):
    """Size and SHA-256 of one file."""

    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """Content of a checkpoint. `checksum` is the SHA-256 of this object with an empty checksum."""

    format: str
    version: int
    step: int
    files: dict[str, FileEntry]
    config: dict[str, Any]
    checksum: str = ""


def rank_file(rank: int) -> str:
    """The file of one rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def entry_of(path: Path) -> FileEntry:
    """Size and digest of a file on disk, which is forced out to the device first."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(path.stat().st_size, digest)


class CheckpointFolder:
    """The checkpoints under `root`. Only one rank may change it at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, newest first."""
        matches = [match for path in self.root.glob("step-*") if (match := _STEP.fullmatch(path.name))]
        return sorted((int(match[1]) for match in matches), reverse=True)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of `step`, once complete."""
        return self.root / f"step-{step:06d}"

    def partial(self, step: int) -> Path:
        """Folder of the checkpoint while it is written; made if missing."""
        path = self.root / f"step-{step:06d}.partial"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, step: int, files: Mapping[str, FileEntry], config: Mapping[str, Any]) -> Path:
        """Complete the checkpoint of `step`: write its manifest and rename it into place."""
        partial, final = self.partial(step), self.path(step)
        manifest = Manifest(FORMAT, FORMAT_VERSION, step, dict(files), dict(config))
        manifest = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
        path = partial / _MANIFEST
        path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        with path.open("rb") as file:
            os.fsync(file.fileno())
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        directory = os.open(self.root, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return final

    def discard(self, step: int) -> None:
        """Remove what was written of an incomplete checkpoint."""
        shutil.rmtree(self.root / f"step-{step:06d}.partial", ignore_errors=True)

    def keep_last(self, number: int) -> None:
        """Remove all but the newest `number` checkpoints."""
        for step in self.steps()[number:]:
            shutil.rmtree(self.path(step))

    def begin_after(self, step: int) -> None:
        """Make the folder, set aside the checkpoints of later steps, and remove the files of an interrupted write."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.root / ".writable").touch()
        (self.root / ".writable").unlink()
        for partial in self.root.glob("*-*.partial"):
            shutil.rmtree(partial)
        for later in [number for number in self.steps() if number > step]:
            aside = self.root / "superseded" / self.path(later).name
            if aside.exists():
                shutil.rmtree(aside)
            aside.parent.mkdir(exist_ok=True)
            self.path(later).rename(aside)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in `path`, without looking at its files.

    Raises:
        CheckpointError: missing, damaged, of another format, or naming files that a checkpoint does not have.
    """
    try:
        if (path / _MANIFEST).stat().st_size > _MANIFEST_LIMIT_BYTES:
            raise _damaged(path, f"a manifest of more than {_MANIFEST_LIMIT_BYTES} bytes")
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise _damaged(path, str(error)) from error
    if manifest.format != FORMAT or manifest.version != FORMAT_VERSION:
        raise CheckpointError(
            "a checkpoint of another format",
            where=str(path),
            got=f"{manifest.format} {manifest.version}",
            expected=f"{FORMAT} {FORMAT_VERSION}",
            fix="Go on with the version of moe-trm that wrote it"
            f" ({'newer' if manifest.version > FORMAT_VERSION else 'older'} than this one, {__version__}),"
            " or begin anew with checkpoint.resume=never.",
        )
    if manifest.checksum != _checksum(manifest):
        raise _damaged(path, "the manifest does not match its own checksum")
    foreign = sorted(name for name in manifest.files if not _FILE.fullmatch(name))
    if foreign or STATE_FILE not in manifest.files:
        raise _damaged(path, f"files {foreign[:3] or 'without ' + STATE_FILE}")
    return manifest


def verify(path: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Compare the files `names` of the checkpoint with its manifest, byte for byte. Raises `CheckpointError`."""
    for name in names:
        file, expected = path / name, manifest.files[name]
        if file.is_symlink() or not file.is_file():
            raise _damaged(path, f"no file {name}")
        if file.stat().st_size != expected.num_bytes:
            raise _damaged(path, f"{name} has {file.stat().st_size} bytes instead of {expected.num_bytes}")
        if entry_of(file) != expected:
            raise _damaged(path, f"{name} does not match its checksum")


def _checksum(manifest: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(manifest, checksum=""))).hexdigest()


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is damaged or incomplete",
        where=str(path),
        got=how,
        expected="the files as they were written",
        fix="Copy it again, or remove it: the one before it will be used.",
    )
