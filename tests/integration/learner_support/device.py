"""A step of Megatron's learner on a device that refuses operands of another, on real ranks.

Started by torchrun: `device.py CHECKPOINT OUT RUN [RUN ...]`, a RUN as in `runs.py`, with `device=cpu` or
`device=other`. Nothing is asserted here.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_trm.config.schema import Config, ParallelConfig
from moe_trm.learner.megatron import build, cpu_shim
from moe_trm.learner.megatron.learner import MegatronLearner
from tests.integration.learner_support.groups import leave_groups
from tests.integration.learner_support.one_step import SETTINGS, figures_of_a_step
from tests.integration.learner_support.runs import do_runs
from tests.unit.other_device import DEVICE, move, other_device


def run(checkpoint: str, out: Path, options: dict[str, str]) -> None:
    """Figures of a step, of this rank."""
    leave_groups()
    learner_settings = {
        "parallel": {name: options[name] for name in ParallelConfig.model_fields if name in options},
        "distributed_optimizer": options.get("distributed", "0") == "1",
        "dtype": options.get("dtype", "float32"),
    }
    config = Config.model_validate(
        {
            "model": {"checkpoint": checkpoint},
            **SETTINGS,
            "learner": learner_settings,
            "batch": {"layout": options.get("layout", "padded")},
        }
    )
    device = DEVICE if options["device"] == "other" else torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch, other_device() if device == DEVICE else nullcontext():
        learner = built(config, device, patch)
        figures = figures_of_a_step(config, learner, device, out)
    (out / f"figures-{dist.get_rank()}.json").write_text(json.dumps(figures))


def built(config: Config, device: torch.device, patch: pytest.MonkeyPatch) -> MegatronLearner:
    """The learner, with what Megatron makes "on CUDA" on `device`."""
    patch.setattr(cpu_shim, "_CPU", device)
    started = build._start_process_group

    def start() -> torch.device:
        started()
        return device

    patch.setattr(build, "_start_process_group", start)
    if device == DEVICE:
        patch.setattr(torch.nn.Module, "to", lambda module, _device: move(module))
    return build.build_megatron_learner(config)


if __name__ == "__main__":
    do_runs(run)
