"""The command line of programs that do runs on real ranks: `PROGRAM CHECKPOINT OUT RUN [RUN ...]`.

A RUN is `key=value:...`, words without `=` only name it. Its results go to OUT/RUN. `model=NAME` takes the checkpoint
NAME beside CHECKPOINT.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def do_runs(do: Callable[[str, Path, dict[str, str]], None]) -> None:
    """Call `do` with checkpoint, folder and options of each run, one after the other, in one group."""
    checkpoint, out, *runs = sys.argv[1:]
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    for run in runs:
        options = dict(option.split("=", 1) for option in run.split(":") if "=" in option)
        folder = Path(out) / run
        folder.mkdir(parents=True, exist_ok=True)
        do(str(Path(checkpoint).with_name(options.get("model", Path(checkpoint).name))), folder, options)
    dist.destroy_process_group()
