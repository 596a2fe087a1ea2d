"""Files and folders that no other user of the machine reads, writes or replaces, and that do not outlive their process.

A process that is killed leaves its `Scratch` behind. The next process that makes one beside it removes what was left.
Whether the owner still lives is told by a lock that the kernel holds for it, also across containers, in which process
ids mean nothing. Removal goes through descriptors and follows no link: nothing outside of the folder is touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from moe_trm.errors import ConfigError, RunError

PREFIX = "moe-trm-"
OWNER = ".owner"
"""The file in a `Scratch` that its process holds locked. A folder without it is left alone."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Scratch:
    """A new folder `path` of mode 0700 and a name that cannot be foretold. A context manager: leaving it removes it.

    It is made in `parent` (None: the folder for temporary files), where first everything is removed that killed
    processes of this user left. Raises `ConfigError` where it cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        self._owner: int | None = None
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._parent = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._folder = os.open(self.path.name, _FOLDER, dir_fd=self._parent)
            self._owner = self._own()
        except OSError as error:
            raise ConfigError(
                "a folder for temporary files cannot be made",
                where=str(parent),
                got=error.strerror or str(error),
                expected="a folder that this user may write, on a file system with room",
                fix="Make room there, or choose another place: TMPDIR for temporary files, sync.dir for weight pushes.",
            ) from error

    def adopt(self, path: Path) -> None:
        """Let a file outside of it, made by a process that works for this one, be removed with it."""
        if self._owner is not None and self._folder >= 0:
            os.write(self._owner, f"{path}\n".encode())

    def remove(self) -> None:
        """Remove it with all that is in it. Safe to call twice."""
        if self._folder < 0:
            return
        try:
            _remove(self.path.name, self._folder, self._parent)
        finally:
            for descriptor in (self._owner, self._folder, self._parent):
                if descriptor is not None:
                    os.close(descriptor)
            self._folder = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _own(self) -> int | None:
        """The locked file, which appears when it is locked; None where the file system has no locks."""
        name = f"{OWNER}.new"
        owner = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | _FILE, 0o600, dir_fd=self._folder)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(owner)
            os.unlink(name, dir_fd=self._folder)
            return None
        os.write(owner, f"{_machine()}\n".encode())
        os.rename(name, OWNER, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        return owner


def remove_abandoned(parent: Path) -> None:
    """Remove each `Scratch` of this user in `parent` whose process, on this machine, has ended."""
    within = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in os.listdir(within):
            if name.startswith(PREFIX):
                with suppress(OSError):  # not a folder, not ours, still owned, or just removed by another process
                    _remove_if_abandoned(name, within)
    finally:
        os.close(within)


def private_folder(path: Path) -> Path:
    """Make a folder of mode 0700, or keep others from writing into an empty one that is there. Returns it.

    Raises `ConfigError` for a folder of another user, who could put a file of ours out of the way and another in, and
    for one with files into which others could write: no one knows which of them are theirs.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() and status.st_uid != _uid_in(path):
        raise ConfigError(
            "this folder belongs to another user",
            where=str(path),
            got=f"owner {status.st_uid}",
            expected=f"owner {os.geteuid()}",
            fix="Choose another run_dir or name.",
        )
    if status.st_mode & 0o022:
        # Nothing can be put there any more while we look.
        path.chmod(stat.S_IMODE(status.st_mode) & ~0o022)
        if inside := sorted(os.listdir(path)):
            path.chmod(stat.S_IMODE(status.st_mode))
            raise ConfigError(
                "other users can write into this folder, and there are files in it",
                where=str(path),
                got=f"mode {stat.S_IMODE(status.st_mode):o}, with {', '.join(inside[:5])}",
                expected="a new folder, an empty one, or one that only this user writes",
                fix=f"Choose another run_dir or name. If you know every file and link in it: chmod -R go-w {path}",
            )
    return path


def open_private(path: Path, flags: int) -> int:
    """Descriptor of a file of this user in a folder of `private_folder`, made with mode 0600 by `os.O_CREAT`.

    Raises `RunError` for a link, and for a file of another user or with a second name: what is written there would go
    into another file. Other errors are `OSError`.
    """
    try:
        file = os.open(path, flags | _FILE, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _not_ours(path, f"a link to {os.readlink(path)}") from error
    found = os.fstat(file)
    if found.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
        os.close(file)
        raise _not_ours(path, f"a file of user {found.st_uid}")
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(file)
        raise _not_ours(path, f"a file with {found.st_nlink} names, of mode {found.st_mode:o}")
    return file


def append_private(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """A file of `open_private` to append to."""
    return open(open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=buffering)


def _not_ours(path: Path, got: str) -> RunError:
    return RunError(
        "a file of this run is not its own",
        where=str(path),
        got=got,
        expected="a file of this user with one name, and no link",
        fix="See who made it, and remove it; or choose another run_dir or name.",
    )


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 0600. A reader sees the old file or the whole new one."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def read_private(path: Path) -> bytes:
    """A file of `write_private`. Raises `OSError`; `PermissionError` for one that others may have written or read."""
    with open(os.open(path, os.O_RDONLY | _FILE), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            raise PermissionError(f"{path} is of user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}")
        return file.read()


def _remove_if_abandoned(name: str, parent: int) -> None:
    folder = os.open(name, _FOLDER, dir_fd=parent)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return
        owner = os.open(OWNER, os.O_RDWR | _FILE, dir_fd=folder)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Locks of some network file systems hold on one machine only.
            if _lines(owner)[:1] == [_machine()]:
                _remove(name, folder, parent)
        finally:
            os.close(owner)
    finally:
        os.close(folder)


def _remove(name: str, folder: int, parent: int) -> None:
    """Empty the open folder, and take it out of its parent: its owner's file last, so that a second try finds it."""
    with suppress(OSError):
        owner = os.open(OWNER, os.O_RDONLY | _FILE, dir_fd=folder)
        adopted = _lines(owner)[1:]
        os.close(owner)
        for path in adopted:
            _unlink_own(path)
    for entry in os.listdir(folder):
        if entry != OWNER:
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(entry, dir_fd=folder, follow_symlinks=False).st_mode):
                    shutil.rmtree(entry, ignore_errors=True, dir_fd=folder)
                else:
                    os.unlink(entry, dir_fd=folder)
    if set(os.listdir(folder)) <= {OWNER}:  # what something still writes into stays for the next start
        with suppress(OSError):
            os.unlink(OWNER, dir_fd=folder)
        with suppress(OSError):
            os.rmdir(name, dir_fd=parent)


def _unlink_own(path: str) -> None:
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            os.unlink(path)


def _lines(owner: int) -> list[str]:
    return os.pread(owner, 1 << 20, 0).decode(errors="replace").splitlines()


def _machine() -> str:
    """This machine since its start, the same in each of its containers."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _uid_in(folder: Path) -> int:
    """The owner of what this process makes in `folder`: network file systems may give root another one."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid
