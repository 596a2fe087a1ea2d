"""A rehearsal of the start, also without GPUs: the GPUs of each side, the server's arguments, the layout, the memory.

Nothing is loaded and no server is started. Without a GPU, Megatron-Core builds the first and the last rank of the
layout on torch's meta device, among process groups of the real sizes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from launch.start.checks import Check, attempt
from launch.start.places import check_gpus
from moe_trm.config.choices import batch_layout
from moe_trm.config.schema import LearnerConfig, RolloutConfig, SyncConfig
from moe_trm.errors import ConfigError, EngineError
from moe_trm.learner.megatron.layers import layers_here
from moe_trm.learner.megatron.switches import Switch, switches
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.registry import FAMILIES
from moe_trm.models.tiny.families import tiny_family
from moe_trm.rollout.servers.backend import Served, backend_of
from moe_trm.rollout.servers.placement import gpus_of, place
from moe_trm.rollout.servers.process import last_words
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.runtime.python import run_instead
from moe_trm.tools.plan.commands import PUBLISHED, published
from moe_trm.tools.plan.needs import Needs

ARGUMENTS_S = 900.0
"""Longest time for an engine to import its modules and to judge its arguments, on a loaded machine."""
DRIVER = "libcuda.so.1"
"""The library of NVIDIA's driver, which CUDA kernels load."""
ARGUMENTS, GPUS, LAYOUT, MEMORY = "server's arguments", "GPUs", "layout in Megatron-Core", "memory on GPUs"
PROOF, SWITCHES = "proof of pushes", "fast paths of Megatron-Core"
STARTS = {"quickstart_start": "qwen3_moe", "gsm8k_tiny": "qwen3_moe", "hybrid_start": "qwen3_next"}
"""Tiny checkpoints that a command makes, by the name of their folder, and their family."""


def described(checkpoint: str, folder: Path) -> str | None:
    """A folder with the config.json of a model whose checkpoint is not on this machine.

    The model is known by the name of its folder: a published one, or a tiny one of `STARTS`. None where the checkpoint
    is here, or its name is not known.
    """
    name = re.sub(r"[.-]", "_", Path(checkpoint).name.lower())
    prefixes = [prefix for prefix in (*published(), *STARTS) if name.startswith(prefix)]
    if Path(checkpoint).exists() or not prefixes:
        return None
    release = folder / max(prefixes, key=len)
    release.mkdir()
    if family := STARTS.get(release.name):
        config = tiny_family(family).config
        config.architectures = [FAMILIES[family].architecture]
        config.save_pretrained(release)
    else:
        shutil.copyfile(PUBLISHED / f"{release.name}.json", release / "config.json")
    return str(release)


def rehearsal(
    served: Served, learner: LearnerConfig, sync: SyncConfig, num_ranks: int, folder: Path, *, absent: bool
) -> Iterator[Check]:
    """Each check; `folder` is for files.

    A run whose server has several GPUs or shares them, or whose checkpoint is `absent` and not tiny, is judged as on
    machines with GPUs. Others are judged as on this one.
    """
    rollout, checkpoint = served.rollout, Path(served.model.checkpoint)
    is_large = absent and checkpoint.name not in STARTS
    if is_large or rollout.colocate or gpus_of(rollout) > 1:
        server = rollout.server.model_copy(update={"device": "cuda"})
        rollout = rollout.model_copy(update={"server": server})
        served = replace(served, rollout=rollout)
    yield attempt(GPUS, lambda: _gpus(rollout, num_ranks))
    settings: dict[str, Any] = {}
    yield attempt(ARGUMENTS, lambda: _arguments(served, folder, settings))
    yield attempt(PROOF, lambda: _proof(rollout, sync, ServedModel.from_checkpoint(checkpoint), settings))
    if learner.backend == "megatron":
        yield attempt(LAYOUT, lambda: _layout(str(checkpoint), learner, num_ranks, exact=served.exact))


def _gpus(rollout: RolloutConfig, num_ranks: int) -> Check | str:
    """Places of the GPUs; on a machine without any, the places on one that has enough."""
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


def _arguments(served: Served, folder: Path, settings: dict[str, Any]) -> Check | str:
    """The engine reads and resolves the command line that a start would use, into `settings`."""
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
        # The engine would take the device that it finds here.
        words += ["--device", "cuda"] if rollout.server.device == "cuda" else []
        # Without CUDA the engine is imported for the CPU, whatever device the arguments name.
        here = {"SGLANG_USE_CPU_ENGINE": "1"} if without_gpu() else {}
        environment = {**os.environ, **launch.environment, **here}
        done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True, timeout=ARGUMENTS_S)
    if done.returncode and without_gpu() and needs_driver(done.stderr):
        needs = f"the kernels of {rollout.engine} that are installed here load only where {DRIVER} of a driver is"
        return Check(ARGUMENTS, "skip", f"not judged: {needs}; the environment without a GPU judges them")
    if done.returncode:
        raise EngineError(
            "the engine refuses the arguments of its server",
            where="rollout.server",
            got=last_words(done.stderr),
            expected="arguments that it starts with",
            fix="Change what it names: a setting of rollout.server, or an argument of rollout.server.extra_args.",
        )
    settings.update(json.loads(done.stdout.splitlines()[-1]))
    return f"{rollout.engine} accepts them, for {rollout.server.device}"


def needs_driver(stderr: str) -> bool:
    """True where a program ended because CUDA kernels found no driver, by its last traceback."""
    error = stderr.rpartition("Traceback (most recent call last)")[2]
    return "ImportError: " in error and f"{DRIVER}: cannot open shared object file" in error


def _proof(rollout: RolloutConfig, sync: SyncConfig, model: ServedModel, settings: Mapping[str, Any]) -> Check | str:
    """The proof that a push would get from a server with these `settings`."""
    if not rollout.traits.has_weights:
        return Check(PROOF, "skip", "nothing is pushed")
    if not sync.verify:
        return Check(PROOF, "warn", "pushes are not verified", "sync.verify=true")
    backend = backend_of(rollout.engine) if rollout.traits.has_servers else None
    if backend is not None and backend.argument_check and not settings:
        return Check(PROOF, "skip", "not judged: the settings of the server are not known")
    reasons = "" if backend is None else backend.unpredicted(settings, model)
    path = f"by sync.method={sync.method}"
    if not reasons:
        ranks = f", for each of {rollout.server.tensor_parallel} ranks" * (rollout.server.tensor_parallel > 1)
        return f"{path}; the checksums of a server are predicted{ranks}"
    if rollout.traits.scores_tokens and sync.prove_every:
        return f"{path}; every push is proved by use, because checksums are not predicted: {reasons}"
    says = f"nothing would prove a push: its checksums are not predicted ({reasons}), and sync.prove_every=0"
    return Check(PROOF, "fail", says, "set sync.prove_every=1, or sync.verify=false and accept unproved weights")


def _layout(checkpoint: str, learner: LearnerConfig, num_ranks: int, *, exact: bool) -> str:
    from moe_trm.learner.megatron.notices import silence_known_notices

    silence_known_notices()
    from moe_trm.learner.megatron import cpu_shim

    cpu_shim.import_uncompiled()
    from megatron.core import package_info

    from moe_trm.learner.megatron.model import transformer_config

    hf, version = read_hf_config(checkpoint), package_info.__version__
    layers = layers_here(learner, hf)
    if not without_gpu():
        # These layers would be on the device at once, whatever device is the default.
        transformer_config(hf, learner, layers, exact=exact)
        return f"its sizes are accepted by Megatron-Core {version}"
    cpu_shim.install()
    from moe_trm.learner.megatron.on_meta import num_parameters

    ends = {0, num_ranks - 1}
    try:
        sizes = [num_parameters(hf, learner, layers, rank, num_ranks, exact=exact) for rank in sorted(ends)]
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"Megatron-Core {version} does not build this model in this layout",
            where="learner.parallel",
            got=f"{type(error).__name__}: {error}",
            expected="a model that it builds",
            fix="Change the layout, or set learner.backend=deepspeed.",
        ) from error
    return f"built by Megatron-Core {version}: {max(sizes) / 1e9:,.2f} billion parameters on a rank"


def fast_switches(learner: LearnerConfig, checkpoint: str, configured: str, layout: str) -> str:
    """A line for each switch: on, or why not. `configured`: `batch.layout`, for which this machine chose `layout`."""
    layers = layers_here(learner, read_hf_config(checkpoint))
    states = switches(layers, packed=layout == "packed")
    if configured == "auto" and without_gpu():
        here = replace(states.pop(), name="packed rows on this machine")
        on_cuda, why = batch_layout(learner, cuda=True, known_model=lambda: True, layout_so_far=lambda: None)
        states += [here, Switch("packed rows on CUDA", (), "" if on_cuda == "packed" else why)]
    return "\n".join(map(str, states))


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
