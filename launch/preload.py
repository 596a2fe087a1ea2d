"""Imports of learner ranks, made once for all of them: the ranks are forks of the process that starts them.

A rank that imports torch, Megatron-Core and the rest itself needs six seconds of a core before its first line of work.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import torch

from moe_trm.config.schema import Config
from moe_trm.learner.megatron.notices import silence_known_notices

LEARNERS: Mapping[str, str] = MappingProxyType(
    {"megatron": "moe_trm.learner.megatron.build", "deepspeed": "moe_trm.learner.deepspeed.build"}
)
THREADS = Path("/proc/self/task")


def preload(config: Config) -> bool:
    """Import what the ranks of this run import. False where they must be processes of their own.

    CUDA does not survive a fork, nor does what the threads of this process hold.
    """
    if torch.cuda.is_available() or not THREADS.is_dir():
        return False
    silence_known_notices()
    with suppress(ImportError):  # the ranks say what is missing
        for name in ("launch.train", LEARNERS[config.learner.backend]):
            importlib.import_module(name)
    # Collections in a fork would otherwise write to, and so copy, every page of what was imported.
    gc.collect()
    gc.freeze()
    return len(list(THREADS.iterdir())) == 1
