"""Imports of learner ranks, made once for all of them: the ranks are forks of the process that starts them.

A rank that imports torch, Megatron-Core and the rest itself needs six seconds of a core before its first line of work.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import torch

from moe_trm.config.schema import Config
from moe_trm.learner.megatron.notices import silence_known_notices

LEARNERS: Mapping[str, str] = MappingProxyType(
    {"megatron": "moe_trm.learner.megatron.build", "deepspeed": "moe_trm.learner.deepspeed.build"}
)
RANK = (
    "moe_trm.checkpoint.resumption",
    "moe_trm.learner.build",
    "moe_trm.loop",
    "moe_trm.observe.build",
    "moe_trm.rollout.build",
    "moe_trm.rollout.client",
    "moe_trm.rollout.service",
    "moe_trm.runtime.gloo",
    "moe_trm.runtime.interruption",
    "moe_trm.step.push",
    "launch.hosts",
    "safetensors.torch",
)
"""Imports of `launch.train` beside its learner. What is missing here is imported by each rank.

The program itself is not in it: it runs as `__main__`.
"""
THREADS = Path("/proc/self/task")


def preload(config: Config) -> bool:
    """Import what the ranks of this run import. False where they must be processes of their own.

    CUDA does not survive a fork, nor does what the threads of this process hold.
    """
    if torch.cuda.is_available() or not THREADS.is_dir():
        return False
    with suppress(ImportError):  # the ranks say what is missing
        import_all((*RANK, LEARNERS[config.learner.backend]))
    return len(list(THREADS.iterdir())) == 1


def import_all(names: Iterable[str]) -> None:
    """Import modules for forks of this process. Raises `ImportError`."""
    silence_known_notices()
    for name in names:
        importlib.import_module(name)
    # Collections in a fork would otherwise write to, and so copy, every page of what was imported.
    gc.collect()
    gc.freeze()
