"""A rehearsal of the start, also without GPUs: the GPUs of each side, the server's arguments, the layout, the memory.

Nothing is loaded and no server is started. Megatron-Core's own configuration judges the sizes of the layout. Its
modules are not built: process groups of a size that a machine has not are private to torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from launch.start.checks import Check, attempt
from launch.start.places import check_gpus
from moe_trm.config.schema import LearnerConfig, RolloutConfig
from moe_trm.errors import EngineError
from moe_trm.learner.megatron.layers import layers_here
from moe_trm.models.hf_config import read_hf_config
from moe_trm.rollout.servers.backend import Served, backend_of
from moe_trm.rollout.servers.placement import gpus_of, place
from moe_trm.rollout.servers.process import last_words
from moe_trm.runtime.python import run_instead
from moe_trm.tools.plan.commands import PUBLISHED, published
from moe_trm.tools.plan.needs import Needs

ARGUMENTS_S = 900.0
"""Longest time for an engine to import its modules and to judge its arguments, on a loaded machine."""
ARGUMENTS, GPUS, LAYOUT, MEMORY = "server's arguments", "GPUs", "layout in Megatron-Core", "memory on GPUs"


def described(checkpoint: str, folder: Path) -> str | None:
    """A folder with the published config.json of a model whose checkpoint is not on this machine.

    The model is known by the name of its folder. None where the checkpoint is here, or its name is not known.
    """
    name = re.sub(r"[.-]", "_", Path(checkpoint).name.lower())
    known = [each for each in published() if name.startswith(each)]
    if Path(checkpoint).exists() or not known:
        return None
    release = folder / max(known, key=len)
    release.mkdir()
    shutil.copyfile(PUBLISHED / f"{release.name}.json", release / "config.json")
    return str(release)


def rehearsal(served: Served, learner: LearnerConfig, num_ranks: int, folder: Path, *, absent: bool) -> Iterator[Check]:
    """Each check; `folder` is for files.

    A run whose server has several GPUs or shares them, or whose checkpoint is `absent`, is judged as on machines with
    GPUs. Others are judged as on this one.
    """
    rollout = served.rollout
    if absent or rollout.colocate or gpus_of(rollout) > 1:
        server = rollout.server.model_copy(update={"device": "cuda"})
        rollout = rollout.model_copy(update={"server": server})
    yield attempt(GPUS, lambda: _gpus(rollout, num_ranks))
    yield attempt(ARGUMENTS, lambda: _arguments(replace(served, rollout=rollout), folder))
    if learner.backend == "megatron":
        yield attempt(LAYOUT, lambda: _layout(served.model.checkpoint, learner, exact=served.exact))


def _gpus(rollout: RolloutConfig, num_ranks: int) -> Check | str:
    """Where they are; on a machine without any, where they would be on one that has enough."""
    num_servers = int(rollout.starts_server)
    if (placed := check_gpus(rollout, num_servers, num_ranks)) is not None:
        return _spans([range(num_ranks), *placed.servers])
    if rollout.server.device != "cuda":
        return Check(GPUS, "skip", "everything runs on the CPU")
    size, shared = gpus_of(rollout), rollout.colocate
    serving = size * num_servers
    number = max(serving, num_ranks) if shared else serving + num_ranks
    placed = place(number, size, num_servers=num_servers, num_ranks=num_ranks, shared=shared)
    return f"{number} on one machine: {_spans([range(num_ranks), *placed.servers])}"


def _spans(sides: Sequence[range]) -> str:
    learner, *servers = (f"{side[0]} to {side[-1]}" if len(side) > 1 else str(side[0]) for side in sides if side)
    return ", ".join([f"learner {learner}", *(f"server {server}" for server in servers)])


def _arguments(served: Served, folder: Path) -> Check | str:
    """The engine reads and resolves the command line that a start would use."""
    rollout = served.rollout
    if not rollout.starts_server:
        return Check(ARGUMENTS, "skip", "no server is started")
    backend = backend_of(rollout.engine)
    if not backend.argument_check:
        return Check(ARGUMENTS, "skip", "servers of this engine are not rehearsed")
    missing = [name for package in rollout.traits.packages if find_spec(name := package.partition("==")[0]) is None]
    if missing:
        return Check(ARGUMENTS, "skip", f"{', '.join(missing)} is not installed here")
    with backend.launch(served, rollout.server.port, "rehearsal", folder) as launch:
        words = run_instead(backend.argument_check, launch.command)
        # Without CUDA the engine is imported for the CPU, whatever device the arguments name.
        here = {"SGLANG_USE_CPU_ENGINE": "1"} if without_gpu() else {}
        environment = {**os.environ, **launch.environment, **here}
        done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True, timeout=ARGUMENTS_S)
    if done.returncode:
        raise EngineError(
            "the engine refuses the arguments of its server",
            where="rollout.server",
            got=last_words(done.stderr),
            expected="arguments that it starts with",
            fix="Change what it names: a setting of rollout.server, or an argument of rollout.server.extra_args.",
        )
    return f"{rollout.engine} accepts them, for {rollout.server.device}"


def _layout(checkpoint: str, learner: LearnerConfig, *, exact: bool) -> str:
    from moe_trm.learner.megatron.notices import silence_known_notices

    silence_known_notices()
    from megatron.core import package_info

    from moe_trm.learner.megatron import cpu_shim
    from moe_trm.learner.megatron.model import transformer_config

    if without_gpu():
        cpu_shim.install()
    hf = read_hf_config(checkpoint)
    transformer_config(hf, learner, layers_here(learner, hf), exact=exact)
    return f"accepted by Megatron-Core {package_info.__version__}"


def without_gpu() -> bool:
    """True on a machine without CUDA."""
    return not torch.cuda.is_available()


def memory(estimate: Needs | None) -> Check:
    """Of each side, against the first GPU of this machine, if it has one. None: of a model that is not planned."""
    if estimate is None:
        return Check(MEMORY, "skip", "the planner does not count this model")
    name, rank, server = MEMORY, estimate.rank_bytes, estimate.server_bytes
    says = f"a learner rank {rank / 1e9:,.1f} GB, a GPU of a server {server / 1e9:,.1f} GB"
    if without_gpu():
        return Check(name, "ok", f"{says}, by the planner's rules")
    room = torch.cuda.get_device_properties(0).total_memory
    if max(rank, server) <= room:
        return Check(name, "ok", f"{says}; a GPU here has {room / 1e9:,.0f} GB")
    return Check(name, "fail", f"{says}; a GPU here has {room / 1e9:,.0f} GB", "find a layout with moe-trm plan CONFIG")
