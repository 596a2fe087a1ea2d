"""The one place where `auto` becomes a value, with the reason in a sentence. Imports no torch.

| setting | decided by | when |
|---|---|---|
| `replay.mode` | off-policiness and age | on loading, before any rule between settings looks |
| `sampling_mask.mode` | truncation, and rules that need the kept distribution | on loading |
| `sync.method` | number and place of the servers, `sync.dir`, the engine | on loading |
| `learner.transformer_engine` | CUDA and Transformer Engine's installation | at launch, where it trains |
| `batch.layout` | CUDA, 8-bit products, DeepSpeed with the model, a checkpoint so far | at launch, where it trains |
| `rollout.server.device` | CUDA | at launch, where the server is started |

What a machine decides stays `auto` until there: a configuration is read and shown on other machines than it runs on.
`observe.panel` and `checkpoint.resume` keep their `auto`: no rule reads them.
They look at a terminal and at a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlsplit

from moe_trm.config.schema import (
    Config,
    CorrectionConfig,
    LearnerConfig,
    PipelineConfig,
    ReplayConfig,
    ReplayMode,
    RolloutConfig,
    ServerConfig,
    SyncConfig,
)
from moe_trm.methods.presets import PRESETS
from moe_trm.runtime.addresses import is_loopback

MACHINE = {
    "learner.transformer_engine": "chosen at launch: on where there are CUDA and Transformer Engine",
    "batch.layout": "chosen at launch: packed where packs have been proved",
    "rollout.server.device": "chosen at launch: cuda where there is one",
}
"""Settings that the machine decides, and what decides, for code that shows an `auto`."""


@dataclass(frozen=True)
class Choice:
    """One `auto` that became a value: its dotted key, the value, and why, with what another would lose, in one
    sentence.
    """

    key: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"auto -> {self.value}: {self.reason}"


def settle(config: Config) -> tuple[Config, tuple[Choice, ...]]:
    """`config` with every `auto` that other settings decide as a value, and the choices made. Twice is as once."""
    choices = []
    mode, reason = replay_mode(config.learner, config.replay, config.pipeline, config.correction)
    if config.replay.mode != mode:
        choices.append(Choice("replay.mode", mode, reason))
        config = config.model_copy(update={"replay": config.replay.model_copy(update={"mode": mode})})
    if config.sampling_mask.mode == "auto":
        choices.append(Choice("sampling_mask.mode", *_mask(config.keeps_masks, config.rollout)))
        mask = config.sampling_mask.model_copy(update={"mode": choices[-1].value})
        config = config.model_copy(update={"sampling_mask": mask})
    if config.sync.method == "auto":
        choices.append(
            Choice(
                "sync.method",
                *sync_method(config.sync, config.rollout, config.pipeline, pictures=config.task.has_pictures),
            )
        )
        sync = config.sync.model_copy(update={"method": choices[-1].value})
        config = config.model_copy(update={"sync": sync})
    return config, tuple(choices)


def settle_here(
    config: Config,
    *,
    cuda: bool,
    problem: Callable[[], str],
    known_model: Callable[[], bool] = lambda: True,
    layout_so_far: Callable[[], str | None] = lambda: None,
) -> tuple[Config, tuple[Choice, ...]]:
    """`config` with every `auto` that the machine decides as a value, and the choices that were made. Twice is as once.

    Settings of a learner or a server that this run does not have stay as they are.

    Args:
        cuda: whether this machine has a device.
        problem: why Transformer Engine cannot be used, empty where it can; asked only where that decides, like the
            others.
        known_model: whether the checkpoint is of a family in `moe_trm.models`.
        layout_so_far: `batch.layout` of the checkpoint that the run goes on from, None where it begins anew.
    """
    choices = []
    learner, rollout, batch = config.learner, config.rollout, config.batch
    if learner.transformer_engine == "auto" and learner.backend == "megatron":
        switch, reason = layers_switch(learner, cuda=cuda, problem=problem)
        choices.append(Choice("learner.transformer_engine", switch, reason))
        learner = learner.model_copy(update={"transformer_engine": switch})
    if batch.layout == "auto":
        layout, reason = batch_layout(learner, cuda=cuda, known_model=known_model, layout_so_far=layout_so_far)
        choices.append(Choice("batch.layout", layout, reason))
        batch = batch.model_copy(update={"layout": layout})
    if rollout.server.device == "auto" and rollout.starts_server:
        device, reason = server_device(rollout.server, cuda=cuda)
        choices.append(Choice("rollout.server.device", device, reason))
        rollout = rollout.model_copy(update={"server": rollout.server.model_copy(update={"device": device})})
    return config.model_copy(update={"learner": learner, "rollout": rollout, "batch": batch}), tuple(choices)


def replay_mode(
    learner: LearnerConfig, replay: ReplayConfig, pipeline: PipelineConfig, correction: CorrectionConfig
) -> tuple[ReplayMode, str]:
    """The replay mode to run with, and why.

    `auto` follows off-policiness (N = optimizer steps per rollout batch) and age: N = 1 at age 0: none;
    N = 2 or 3 at age 0: R2, or R3 where the learner's own weights have no anchor pass to freeze; N >= 4, or any age:
    R3.
    """
    updates = learner.minibatches * learner.epochs
    if replay.mode != "auto":
        return replay.mode, "as configured"
    bypass = correction.preset is not None and PRESETS[correction.preset].bypass
    return _replay(updates, pipeline.staleness_limit, frozen=not bypass and pipeline.proximal == "start")


def _mask(keeps_masks: bool, rollout: RolloutConfig) -> tuple[Literal["keep", "off"], str]:
    """The mode that `auto` becomes, why, and what the run would lose with the other."""
    if rollout.truncates:
        return "keep", "sampling is truncated; off would score ids that the rollout could not sample"
    if keeps_masks:
        return "keep", (
            "a rule (divergence=exact) or the advantage reads the rollout's whole distribution, which the mask records"
        )
    return (
        "off",
        "nothing is truncated, so the policy is the whole vocabulary; keep would record thousands of ids a token",
    )


def _replay(updates: int, max_age: int, *, frozen: bool = True) -> tuple[ReplayMode, str]:
    """The mode that `auto` becomes, why, and what the run would lose with the other."""
    if max_age > 0:
        return (
            "R3",
            f"samples may be {max_age} version{'s' if max_age > 1 else ''} old, so the learner's own routes are not "
            "those that sampled; R2 would freeze the learner's newer routes, and the flips since then would stay in "
            "the ratios, for corrections to drop or clip",
        )
    if updates >= 4:
        return (
            "R3",
            f"{updates} optimizer steps per rollout batch move the routers far from the rollout's; R2 would freeze the "
            "learner's routes, and its flips against the rollout would stay in the ratios, for corrections to drop or "
            "clip",
        )
    if updates >= 2 and not frozen:
        return (
            "R3",
            f"{updates} optimizer steps per fresh rollout batch; R2 would replay the routes of a pass at the learner's "
            "weights before them, which plays no part here",
        )
    if updates >= 2:
        return (
            "R2",
            f"{updates} optimizer steps per fresh rollout batch; freezing the learner's own routes is enough, and R3 "
            "would train under routes that are not the learner's, and record and send those of every token (it alone "
            "takes the engines' flips out of the ratios)",
        )
    return (
        "none",
        "one optimizer step per fresh rollout batch is on-policy; R2 would have no second step to hold routes for, and "
        "R3 would record and send those of every token (it alone takes the engines' flips out of the ratios)",
    )


def sync_method(
    sync: SyncConfig, rollout: RolloutConfig, pipeline: PipelineConfig, *, pictures: bool = False
) -> tuple[Literal["disk", "distributed"], str]:
    """The method of pushes, and the reason for it. `auto` is never what a rule refuses."""
    if sync.method != "auto":
        return sync.method, "as configured"
    traits, ranks = rollout.traits, rollout.server.tensor_parallel
    if not traits.has_weights:
        return "disk", "this engine takes no weights"
    if pictures:
        return "disk", "broadcasts have not been tried with a vision tower, so the server has to see the folder"
    if sync.dir:
        return "disk", "sync.dir names a folder, which every server has to see"
    if not rollout.attached:
        return "disk", "the run starts the server on its own machine, where both see the folder"
    if len(rollout.urls) > 1:
        return "disk", f"a broadcast reaches one server, and there are {len(rollout.urls)}; all have to see the folder"
    if is_loopback(urlsplit(rollout.addresses[0]).hostname or ""):
        return "disk", "the server is on this machine, where both see the folder"
    if not traits.broadcast_receivers or (traits.broadcast_to_one_rank and ranks > 1):
        return "disk", "this server takes no broadcasts, so it has to see the folder"
    if pipeline.partial == "interrupt":
        return "disk", "ranks that broadcast cannot interrupt samples, so the server has to see the folder"
    return "distributed", _BROADCAST


_BROADCAST = (
    "one server on another machine may not see this one's folders; disk needs sync.dir on storage that both see, and "
    "can give a server that comes back its weights again"
)

BECOMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "replay.mode": tuple(
            f"{mode}: {reason}" for mode, reason in (_replay(1, 0), _replay(2, 0), _replay(4, 0), _replay(1, 1))
        ),
        "sync.method": ("disk: the server sees the folder, or takes no broadcasts", f"distributed: {_BROADCAST}"),
    }
)
"""The value of an `auto` in typical cases, and its reason, for code that explains the key."""


def wants_routes(config: Config) -> bool:
    """True where the rollout engine is asked for the experts of every token: to replay them, or for the probe."""
    return settle(config)[0].replay.mode == "R3" or config.probe.every > 0


def layers_switch(
    learner: LearnerConfig, *, cuda: bool, problem: Callable[[], str]
) -> tuple[Literal["on", "off"], str]:
    """`on` where Megatron's layers are Transformer Engine's, else `off`, and why. Arguments as of `settle_here`."""
    if learner.transformer_engine != "auto":
        return learner.transformer_engine, "as configured"
    if not cuda:
        return "off", "no CUDA device"
    if learner.lora.rank:
        return "off", "adapters (learner.lora) are merged into Megatron's own layers"
    if why := problem():
        return "off", why
    return "on", "there are CUDA and a working Transformer Engine"


def batch_layout(
    learner: LearnerConfig,
    *,
    cuda: bool,
    known_model: Callable[[], bool],
    layout_so_far: Callable[[], str | None],
) -> tuple[Literal["packed", "padded"], str]:
    """The layout that `auto` becomes: packs where they were proved equal to padded rows; and why."""
    if cuda:
        return "padded", "packs have been proved on CPUs only"
    if learner.fp8 != "none":
        return "padded", "8-bit products over packs have not been proved"
    if learner.backend == "deepspeed" and not known_model():
        return "padded", "packed sequences are not known to be kept apart by every layer of this model"
    if layout_so_far() == "padded":
        return "padded", "the checkpoint that the run goes on from was made with padded rows"
    return "packed", "packs compute the same without padding; padded rows would compute padding too"


def server_device(server: ServerConfig, *, cuda: bool) -> tuple[Literal["cpu", "cuda"], str]:
    """The rollout server's device, and why."""
    if server.device != "auto":
        return server.device, "as configured"
    return ("cuda", "there is a CUDA device") if cuda else ("cpu", "no CUDA device")
