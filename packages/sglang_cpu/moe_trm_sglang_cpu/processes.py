"""The start of SGLang's processes: forks of the one that has imported everything, with the served model's code alone.

SGLang starts each process as a fresh interpreter, which imports all of SGLang again, because CUDA does not survive a
fork. It also imports the code of every model that it knows, to find the one that it serves. Without CUDA neither is
needed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys

LAUNCHERS = ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses")
MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
"""SGLang's own variable: a package whose models it takes before it imports all of its own."""

NO_COPY = "SGLANG_EAGER_INPUT_NO_COPY"
"""SGLang's own variable: a pass without graphs reads its batch where it is."""


def register() -> None:
    """Ask SGLang to call `fork_from_here` before it starts processes, and to look into `served` for its model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    os.environ.setdefault(MODELS, "moe_trm_sglang_cpu.served")
    os.environ.setdefault(NO_COPY, "1")
    for name in LAUNCHERS:
        HookRegistry.register(f"sglang.srt.entrypoints.engine.Engine.{name}", fork_from_here, HookType.BEFORE)


def fork_from_here(*_arguments: object, **_options: object) -> None:
    """Let the next processes be forks of this one, unless it has threads: a fork would lose them with what they hold.

    Collections of garbage in a fork would write to every page of what was imported, and so copy it. Megatron-Core is
    hidden: SGLang imports it for one of its debugging aids, where it is installed.
    """
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    if len(os.listdir("/proc/self/task")) > 1:
        multiprocessing.set_start_method("spawn", force=True)
        return
    multiprocessing.set_start_method("fork", force=True)
    gc.collect()
    gc.freeze()
