"""A benchmark in a world of its own (Linux): no other program sees its processes, its shared memory and its mounts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_INSIDE = "MOE_TRM_APART"
# The shell takes the place of init: it waits for processes whose parents have ended.
_INIT = 'mount -t tmpfs tmpfs /dev/shm && "$@"; exit $?'


def run_isolated(module: str, arguments: Sequence[str]) -> int | None:
    """Run `python -m module` again where it is alone; its exit status. None in there.

    All that it started ends with it. It needs `unshare` of util-linux, and root or user namespaces.
    """
    if _INSIDE in os.environ:
        return None
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    world = ["unshare", *user, "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [*world, "sh", "-c", _INIT, "sh", sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env={**os.environ, _INSIDE: "1"}, check=False).returncode


def small_disk(folder: Path, mebibytes: int) -> Path:
    """Make `folder` a file system of this size, in memory. It goes with the world of the benchmark."""
    assert _INSIDE in os.environ, "a mount that would stay"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "tmpfs", str(folder)], check=True)
    return folder
