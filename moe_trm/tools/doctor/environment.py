"""The machine and its installed packages, against the tested versions and the needs of the configuration."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from launch.start.checks import Check
from launch.start.cuda import cuda_problem
from moe_trm.config.schema import CheckpointConfig, LearnerConfig, RolloutConfig, SyncConfig

TESTED = {
    "torch": ("2.14.1", "2.13.0"),
    "megatron-core": ("0.19.2", "0.16.1"),
    "transformers": ("5.19.0",),
    "safetensors": ("0.8.0",),
}
"""Versions that the tests run with, as pinned in requirements/cpu.txt for Python 3.12 and 3.11."""
PYTHONS = ((3, 11), (3, 12))
GIB = 2**30
BYTES_PER_PUSH = 2
"""Pushes that may lie in shared memory at once, in sizes of the checkpoint."""


def environment(
    folder: str,
    rollout: RolloutConfig,
    learner: LearnerConfig,
    sync: SyncConfig,
    checkpoint: CheckpointConfig,
    run_dir: str,
) -> Iterator[Check]:
    """Every check that needs neither engine nor checkpoint tensors; `folder`: of the model."""
    yield _python()
    yield from _packages(rollout, learner)
    yield _devices(rollout)
    size = checkpoint_bytes(Path(folder))
    yield _memory(size)
    yield _shared_memory(sync, rollout, size)
    yield _disk(run_dir, checkpoint, size)
    yield _port(rollout)


def checkpoint_bytes(folder: Path) -> int:
    """Size of the weights on disk; 0 where there are none."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _python() -> Check:
    python_version = sys.version_info[:2]
    says = f"{python_version[0]}.{python_version[1]}"
    if python_version in PYTHONS:
        return Check("python", "ok", says)
    return Check("python", "warn", f"{says}; tested with 3.11 and 3.12", "make a virtual environment with one of these")


def _packages(rollout: RolloutConfig, learner: LearnerConfig) -> Iterator[Check]:
    trainer = "megatron-core" if learner.backend == "megatron" else "deepspeed"
    releases = {name: TESTED.get(name, ()) for name in ("torch", "transformers", "safetensors", trainer)}
    for package in () if rollout.attached else rollout.traits.packages:
        name, _, release = package.partition("==")
        releases[name] = (release,) if release else ()
    for name, tested in sorted(releases.items()):
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield Check(name, "fail", "not installed", f"pip install {name}, or make install")
            continue
        same = not tested or installed.split("+")[0] in tested
        yield Check(
            name, "ok" if same else "warn", installed if same else f"{installed}; tested with {' and '.join(tested)}"
        )


def _devices(rollout: RolloutConfig) -> Check:
    if problem := cuda_problem():
        needs_cuda = rollout.server.device == "cuda"
        return Check(
            "devices",
            "fail" if needs_cuda else "ok",
            f"{problem}; {os.cpu_count()} cores: the CPU lane",
            "set rollout.server.device=auto" if needs_cuda else "",
        )
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Check(
        "devices",
        "ok",
        f"{torch.cuda.device_count()} x {', '.join(sorted(names))}; CUDA {torch.version.cuda}, NCCL {nccl}",
    )


def _memory(size: int) -> Check:
    # On CPU: the engine's copy, the learner's float32 weights, gradients and two moments, and a push.
    need, free = 12 * size, psutil.virtual_memory().available
    says = f"{free / GIB:.1f} GiB available"
    if torch.cuda.is_available() or need <= free:
        return Check("memory", "ok", says)
    return Check("memory", "fail", f"{says}, about {need / GIB:.1f} GiB needed", "use a smaller model or more memory")


def _shared_memory(sync: SyncConfig, rollout: RolloutConfig, size: int) -> Check:
    folder = Path(sync.dir) if sync.dir else Path("/dev/shm")
    if sync.method == "distributed" or not rollout.traits.has_weights:
        return Check("weight pushes", "skip", "they use no files")
    if not folder.is_dir():
        return Check(
            "weight pushes", "warn", f"{folder} does not exist", "set sync.dir to a fast folder that both engines see"
        )
    free, need = shutil.disk_usage(folder).free, BYTES_PER_PUSH * size
    says = f"{free / GIB:.1f} GiB free in {folder}"
    if free >= need:
        return Check("weight pushes", "ok", says)
    return Check(
        "weight pushes",
        "fail",
        f"{says}, {need / GIB:.1f} GiB needed",
        "set sync.dir, or enlarge shared memory (docker: --shm-size)",
    )


def _disk(run_dir: str, checkpoint: CheckpointConfig, size: int) -> Check:
    folder = Path(checkpoint.dir or run_dir).resolve()
    while not folder.exists():
        folder = folder.parent
    # Float32 weights and two moments of each checkpoint that is kept, one more while it is written, and the export.
    per_checkpoint = 6 * size
    need = per_checkpoint * (checkpoint.keep + 1) + size
    free = shutil.disk_usage(folder).free
    says = f"{free / GIB:.1f} GiB free for {run_dir}"
    if free >= need:
        return Check("disk", "ok", says)
    return Check(
        "disk", "fail", f"{says}, about {need / GIB:.1f} GiB needed", "set checkpoint.dir, or checkpoint.keep=1"
    )


def _port(rollout: RolloutConfig) -> Check:
    server = rollout.server
    if not rollout.starts_server:
        return Check("port", "skip", "no server is started")
    if server.port == 0:
        return Check("port", "ok", "any free one")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError as error:
            return Check(
                "port",
                "fail",
                f"{server.host}:{server.port}: {error.strerror}",
                "stop what uses it, or set rollout.server.port=0",
            )
    return Check("port", "ok", f"{server.host}:{server.port} is free")
