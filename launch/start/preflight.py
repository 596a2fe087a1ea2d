"""Everything that can be refused about a run is refused here, before a tensor is loaded or a process started."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from launch.start.cuda import check_gpus
from launch.start.dry_run import try_task
from launch.start.places import check_folders, check_prompts, check_ranks, check_server
from moe_trm.config import load_with_choices
from moe_trm.config.choices import Choice, settle_here
from moe_trm.config.problems import Problem, refuse
from moe_trm.config.rules import explained, refusals
from moe_trm.config.schema import CheckpointConfig, Config, ParallelConfig
from moe_trm.errors import CheckpointError, refuse_together
from moe_trm.learner.checkpoint.folder import CheckpointFolder, read_manifest
from moe_trm.learner.checkpoint.resumption import folder_of
from moe_trm.learner.deepspeed.settings import check_installed
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.hf_tensors import check_tensors
from moe_trm.learner.megatron.layers import layers_here, transformer_engine_problem
from moe_trm.learner.model_rules import check_trained
from moe_trm.models.hf_config import check_vocabulary, read_full_config, read_hf_config
from moe_trm.models.pictures import picture_tokens
from moe_trm.models.registry import keeps_packs_apart
from moe_trm.observe.trackers import check_trackers
from moe_trm.recording.existing import check_not_anothers
from moe_trm.rollout.servers.backend import Served, backend_of
from moe_trm.step.recipe import recipe


def load_here(path: str, overrides: Sequence[str] = ()) -> tuple[Config, tuple[Choice, ...]]:
    """The configuration with nothing left at `auto` that a rule reads, and every choice that was made.

    Other settings decide, then this machine. Raises `ConfigError` as `load` does, also for what
    contradicts the machine's choices.
    """
    config, of_settings = load_with_choices(path, overrides, here=lambda config: _settled_here(config)[2])
    settled, of_machine, contradicted = _settled_here(config)
    refuse(f"{path} on this machine", contradicted)
    return settled, of_settings + of_machine


def _settled_here(config: Config) -> tuple[Config, tuple[Choice, ...], list[Problem]]:
    """With this machine's choices, these, and what they contradict."""
    settled, choices = settle_here(
        config,
        cuda=torch.cuda.is_available(),
        problem=transformer_engine_problem,
        known_model=lambda: not config.task.has_pictures and _packs(config.model.checkpoint),
        layout_so_far=lambda: _layout_so_far(config.checkpoint, Path(config.run_dir) / config.name),
    )
    return settled, choices, explained(refusals(settled), choices)


def _packs(checkpoint: str) -> bool:
    """True where packs of this model are right. One that cannot be read is refused later, with the reason."""
    try:
        return keeps_packs_apart(read_hf_config(checkpoint))
    except CheckpointError:
        return False


def _layout_so_far(checkpoint: CheckpointConfig, run_dir: Path) -> str | None:
    """`batch.layout` of the checkpoint that the run goes on from; None: it begins anew.

    A checkpoint that cannot be read is refused or skipped later, with the reason. One from before there were packs has
    padded rows.
    """
    resume, checkpoints = checkpoint.resume, CheckpointFolder(folder_of(checkpoint, run_dir))
    paths = (
        [checkpoints.path(step) for step in checkpoints.steps()]
        if resume == "auto"
        else [Path(resume)] * (resume != "never")
    )
    for path in paths:
        with suppress(CheckpointError):
            return str(read_manifest(path).config.get("batch", {}).get("layout", "padded"))
    return None


def check_start(config: Config, world_size: int) -> None:
    """As `check_launch`, on the machine that starts the rollout server, before that; and try the task.

    Raises `EngineError` too, for a port that is taken.
    """
    rollout = config.rollout
    check = check_server if rollout.starts_server else check_ranks
    check_launch(config, world_size=world_size, server=[lambda: check(rollout, world_size)])
    try_task(config)


def check_launch(
    config: Config, *, world_size: int, restarted: bool = False, server: Sequence[Callable[[], object]] = ()
) -> None:
    """Raise `ConfigError` or `CheckpointError` with the reason when this run cannot work.

    The checks cover the machine's GPUs, files, folders, the checkpoint's config.json, tokenizer and tensor names, and
    whether the learner can train that model (Megatron-Core: in this layout). They also cover the names and thresholds
    of corrections and loss, the checkpoint to go on from, and another run's recording in the way. `restarted`: these
    ranks replace some of the same run that died. `server`: further checks, told with the first.
    """
    refuse_together(
        lambda: read_hf_config(config.model.checkpoint),
        check_gpus,
        lambda: check_prompts(config.task),
        lambda: check_folders(config.checkpoint, config.record, config.sync, config.name, config.run_dir),
        *server,
    )
    hf_config = check_model_and_layout(config, world_size)
    check_tensors(HfCheckpoint(config.model.checkpoint), hf_config)
    check_vocabulary(config.model.checkpoint, int(hf_config["vocab_size"]))
    recipe(config)
    check_trackers(config.observe)
    if config.checkpoint.resume not in ("auto", "never"):
        read_manifest(Path(config.checkpoint.resume))
    if config.record.bundle and not restarted:
        saved_steps = CheckpointFolder(folder_of(config.checkpoint, Path(config.run_dir) / config.name)).steps()
        check_not_anothers(
            Path(config.record.bundle),
            (config.run_dir, config.name),
            goes_on=bool(saved_steps) and config.checkpoint.resume != "never",
        )


def check_model_and_layout(config: Config, world_size: int) -> dict[str, Any]:
    """Refuse a model or a layout that the learner cannot train or the engine cannot serve, from config.json alone.

    Returns config.json.

    Raises `ConfigError` or `CheckpointError` with the reason.
    """
    hf_config, where = read_hf_config(config.model.checkpoint), f"{config.model.checkpoint}/config.json"
    is_megatron = config.learner.backend == "megatron"
    megatron = version("megatron-core") if is_megatron else ""
    checks: list[Callable[[], object]] = [
        lambda: check_trained(config, hf_config, where, megatron=megatron, world_size=world_size)
    ]
    if config.task.has_pictures:
        checks.append(lambda: picture_tokens(read_full_config(config.model.checkpoint), where))
    if config.rollout.traits.has_servers:
        checks.append(lambda: backend_of(config.rollout.engine).check(Served.of(config)))
    refuse_together(*checks)
    if is_megatron:
        layers_here(config.learner, hf_config)
    else:
        check_installed()
    return hf_config


def smallest_world(parallel: ParallelConfig) -> int:
    """Fewest ranks that hold one copy of the model under these parallel sizes."""
    dense = parallel.tensor * parallel.context
    expert = parallel.expert * parallel.expert_tensor
    return parallel.pipeline * math.lcm(dense, expert)
