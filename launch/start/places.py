"""Everything outside the configuration that a run needs before it starts: folders, files, the device and the port."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from launch.start.cuda import cuda_problem
from moe_trm.config.schema import CheckpointConfig, RecordConfig, RolloutConfig, SyncConfig, TaskConfig
from moe_trm.errors import ConfigError, refuse_together
from moe_trm.rollout.servers.placement import Placement, gpus_of, place, servers_here
from moe_trm.rollout.servers.port import held_port
from moe_trm.rollout.servers.process import visible_gpus
from moe_trm.runtime.private import PREFIX
from moe_trm.tasks.rows import check_source

SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux."""
LONGEST_SOCKET = "tmp12345678"
"""As long as the names of the sockets in a folder of ours: SGLang's, the controller's."""


def check_prompts(task: TaskConfig) -> None:
    """Every prompt file is there. Raises `ConfigError`."""
    if task.reads_prompts:
        sources = [task.prompts, task.eval_prompts, *task.eval_sets.values()]
        refuse_together(*(lambda source=source: check_source(source) for source in sources if source))


def check_folders(
    checkpoint: CheckpointConfig, record: RecordConfig, sync: SyncConfig, name: str, run_dir: str
) -> None:
    """The run can write where it is told to. Raises `ConfigError`."""
    named = {
        "run_dir": str(Path(run_dir) / name),
        "checkpoint.dir": checkpoint.dir,
        "record.bundle": record.bundle,
        "sync.dir": sync.dir,
    }
    writable = (lambda key=key, to=to: _writable(f"config key {key}", Path(to)) for key, to in named.items() if to)
    refuse_together(*writable, lambda: _temporary(Path(tempfile.gettempdir())))


def check_server(rollout: RolloutConfig, num_ranks: int = 0) -> None:
    """A rollout server of this machine has its GPUs beside `num_ranks` learner ranks', and its port.

    Raises `ConfigError`, `EngineError`.
    """
    num_servers, _ = servers_here(rollout, rollout.server.port)
    refuse_together(
        lambda: _device(rollout), lambda: check_gpus(rollout, num_servers, num_ranks), lambda: _port(rollout)
    )


def check_ranks(rollout: RolloutConfig, num_ranks: int) -> None:
    """The learner ranks of this machine have GPUs that its rollout server leaves. Raises `ConfigError`.

    Where CUDA_VISIBLE_DEVICES is set, this process may see other GPUs than the server.
    """
    beside = rollout.starts_server and "CUDA_VISIBLE_DEVICES" not in os.environ
    check_gpus(rollout, int(beside), num_ranks)


def check_gpus(rollout: RolloutConfig, num_servers: int, num_ranks: int) -> Placement | None:
    """The GPUs of this machine for so many servers and learner ranks; None where it has none.

    Raises `ConfigError` where they are too few.
    """
    if not (gpus := visible_gpus()):
        return None
    shared = rollout.colocate
    return place(len(gpus), gpus_of(rollout), num_servers=num_servers, num_ranks=num_ranks, shared=shared)


def _port(rollout: RolloutConfig) -> None:
    with held_port(rollout.server.host, rollout.server.port):
        pass


def _device(rollout: RolloutConfig) -> None:
    if rollout.server.device == "cuda" and (problem := cuda_problem()):
        raise ConfigError(
            "this machine has no CUDA device for the rollout server",
            where="config key rollout.server.device",
            got=f"cuda; {problem}",
            expected="auto or cpu",
            fix="Leave it at auto. Where there is a GPU, look at nvidia-smi, CUDA_VISIBLE_DEVICES and torch's build.",
        )


def _temporary(folder: Path) -> None:
    """Sockets can be made in the folder for temporary files."""
    _writable("environment variable TMPDIR", folder)
    path = f"{folder}/{PREFIX}12345678/{LONGEST_SOCKET}"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise ConfigError(
            "the path of the folder for temporary files is too long for a socket in it",
            where="environment variable TMPDIR",
            got=f"{folder} ({len(os.fsencode(folder))} bytes)",
            expected=f"at most {SOCKET_PATH_BYTES - len(os.fsencode(path)) + len(os.fsencode(folder))} bytes",
            fix="Set TMPDIR to a folder with a shorter path, e.g. /tmp.",
        )


def _writable(key: str, folder: Path) -> None:
    """A file can be made in `folder`, or in the nearest folder above it that is there; nothing stays."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            "the run cannot write there",
            where=key,
            got=f"{folder} ({error.strerror}: {existing})",
            expected="a folder that can be made and written",
            fix=f"Set {key.split()[-1]} to another folder, or give this user the right to write.",
        ) from error
