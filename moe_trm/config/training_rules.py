"""Rules between settings of batches, KL, optimizer and layout. See `moe_trm.config.rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_trm.config import pipeline_layout
from moe_trm.config.correction_rules import loss_facts, preset_of
from moe_trm.config.learning_rate import learning_rate
from moe_trm.config.lora_rules import ROUTER
from moe_trm.config.problems import Problem
from moe_trm.config.schema import (
    AdvantageConfig,
    BatchConfig,
    Config,
    CorrectionConfig,
    KlConfig,
    LayerNoiseConfig,
    LearnerConfig,
    LossConfig,
    OptimizerConfig,
    PipelineConfig,
    Recovery,
    ReplayConfig,
    RolloutConfig,
    TrainConfig,
)
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.methods.losses import needs

_OFFLOADING = {
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
}
"""Options of Megatron-Core's optimizer that `learner.offload_optimizer` sets."""


def refusals(config: Config) -> list[Problem]:
    """The reasons that these settings cannot work; empty when they can."""
    return [
        *_batch(config.batch, config.rollout, config.learner, config.advantage, config.loss),
        *_routers(config.learner, config.loss, config.pipeline, config.replay),
        *_router_losses(config.learner, config.loss),
        *_kl(config.kl, config.advantage, config.batch),
        *_optimizer(config.optimizer, config.learner, config.train, config.pipeline),
        *_parallel(config.learner),
        *_layer_noise(config.learner.layer_noise, config.correction, config.loss, config.pipeline.recovery),
    ]


def _batch(
    batch: BatchConfig, rollout: RolloutConfig, learner: LearnerConfig, advantage: AdvantageConfig, loss: LossConfig
) -> Iterator[Problem]:
    rows, parts = rollout.prompts_per_step * rollout.group_size, learner.minibatches
    if rows % parts:
        yield Problem(
            "learner.minibatches",
            "a step's sequences must split evenly",
            got=f"{rows} sequences (rollout.prompts_per_step * rollout.group_size) in {parts} minibatches",
            expected=f"a divisor of {rows}",
        )
    if learner.micro_batch_rows is not None and learner.micro_batch_tokens is not None:
        yield Problem(
            "learner.micro_batch_tokens",
            "micro-batches are cut by rows or by tokens",
            got=f"micro_batch_rows={learner.micro_batch_rows} and micro_batch_tokens={learner.micro_batch_tokens}",
            expected="one of the two",
            fix="set learner.micro_batch_rows=null",
        )
    if learner.micro_batch_tokens is not None and learner.micro_batch_tokens < rollout.max_new_tokens:
        yield Problem(
            "learner.micro_batch_tokens",
            "one answer may be longer than a micro-batch",
            got=f"{learner.micro_batch_tokens} tokens with rollout.max_new_tokens={rollout.max_new_tokens}",
            expected="at least the longest prompt and answer together",
        )
    if rollout.group_size == 1 and ADVANTAGES[advantage.name].compares:
        yield Problem(
            "rollout.group_size",
            f"advantage.name={advantage.name} compares the samples of one prompt; with one sample there is no baseline",
            got="1",
            expected="at least 2",
            fix="raise rollout.group_size, or set advantage.name=reinforce_plus_plus, whose baseline is the batch",
        )
    if "groups" in needs(loss.name) and rollout.prompts_per_step % learner.minibatches:
        yield Problem(
            "learner.minibatches",
            f"loss {loss.name} compares the samples of a prompt, which stay in one minibatch: "
            "prompts must split evenly",
            got=f"{learner.minibatches} minibatches of {rollout.prompts_per_step} prompts",
            expected=f"a divisor of {rollout.prompts_per_step}",
        )
    if rollout.group_size == 1 and batch.zero_variance == "drop":
        yield Problem(
            "batch.zero_variance",
            "one sample per prompt has no variance: every group would be dropped",
            got="drop with rollout.group_size=1",
            expected="keep, or rollout.group_size of at least 2",
        )


def _routers(
    learner: LearnerConfig, loss: LossConfig, pipeline: PipelineConfig, replay: ReplayConfig
) -> Iterator[Problem]:
    """The needs of a loss that compares the routers' scores of two passes."""
    name = loss.name
    if "routers" not in needs(name):
        return
    needed = [
        ("replay.mode", replay.mode != "none", "none", "both passes must use the same experts", "R2 or R3"),
        (
            "replay.missing",
            replay.missing == "reject",
            "native",
            "tokens without routes have other experts in each pass",
            "reject",
        ),
        (
            "pipeline.behavior",
            pipeline.has_anchor_pass,
            pipeline.recovery,
            "the routers are compared with those of the anchor, and no pass is made for it",
            "snapshot or merged",
        ),
        (
            "learner.parallel.pipeline",
            learner.backend != "megatron" or learner.parallel.pipeline == 1,
            str(learner.parallel.pipeline),
            "the last stage makes the loss before it could hear of the other stages' routers",
            "1",
        ),
    ]
    for key, fits, got, why, expected in needed:
        if not fits:
            yield Problem(key, why, got=f"{got} with loss.name={name}", expected=expected)


def _router_losses(learner: LearnerConfig, loss: LossConfig) -> Iterator[Problem]:
    """Losses of routers that do not train would move the hidden states alone."""
    frozen = [("learner.freeze_router", "true", "false")] if learner.freeze_router else []
    if learner.lora.rank and ROUTER not in learner.lora.targets:
        frozen.append(("learner.lora.targets", ", ".join(learner.lora.targets), f"{ROUTER} among them"))
    for term, coef in loss.router_coefs.items():
        for key, got, expected in frozen:
            yield Problem(
                key,
                "a loss of routers that do not train would bend the hidden states to them",
                got=f"{got} with {term}={coef}",
                expected=expected,
                fix=f"set {term}=0, or train the routers",
            )


def _kl(kl: KlConfig, advantage: AdvantageConfig, batch: BatchConfig) -> Iterator[Problem]:
    if kl.controller == "adaptive" and kl.coef == 0:
        yield Problem(
            "kl.coef",
            "an adaptive coefficient grows from where it starts",
            got="0 with kl.controller=adaptive",
            expected="a positive number, e.g. 0.001",
        )
    if kl.coef and kl.where == "reward" and advantage.name == "gdpo":
        yield Problem(
            "kl.where",
            "gdpo compares named rewards one by one, and the KL lowers their sum",
            got="reward with advantage.name=gdpo",
            expected="loss",
        )
    if kl.coef and kl.where == "advantage" and kl.estimator != "k1":
        yield Problem(
            "kl.estimator",
            "as an advantage only log(policy / reference) of the sampled token has the gradient of the KL",
            got=f"{kl.estimator} with kl.where=advantage",
            expected="k1",
        )
    if kl.coef and kl.where == "advantage" and batch.zero_variance == "drop":
        yield Problem(
            "batch.zero_variance",
            "groups of equal rewards have the advantages of the KL",
            got="drop with kl.where=advantage",
            expected="keep",
        )
    if kl.where == "reward" and kl.estimator == "k3_is":
        yield Problem(
            "kl.estimator",
            "k3_is differs from k3 by its gradient, which a reward does not have",
            got="k3_is with kl.where=reward",
            expected="k1, k2, k3 or abs",
        )


def _optimizer(
    optimizer: OptimizerConfig, learner: LearnerConfig, train: TrainConfig, pipeline: PipelineConfig
) -> Iterator[Problem]:
    rate = learning_rate(optimizer, learner, train)
    if optimizer.min_lr > optimizer.lr:
        yield Problem(
            "optimizer.min_lr",
            "the schedule goes down",
            got=f"{optimizer.min_lr} above optimizer.lr={optimizer.lr}",
            expected="at most optimizer.lr",
        )
    if optimizer.schedule != "constant" and rate.num_steps <= optimizer.warmup_steps:
        yield Problem(
            "optimizer.warmup_steps",
            "warm-up takes as long as the whole schedule",
            got=f"{optimizer.warmup_steps} of {rate.num_steps} optimizer steps",
            expected=f"less than {rate.num_steps}",
            fix="lower optimizer.warmup_steps, or set optimizer.decay_steps",
        )
    elif optimizer.schedule == "wsd" and rate.final_steps > rate.num_steps - optimizer.warmup_steps:
        yield Problem(
            "optimizer.final_steps",
            "the way down does not fit after warm-up",
            got=f"{rate.final_steps} of {rate.num_steps} optimizer steps, {optimizer.warmup_steps} of them warm-up",
            expected=f"at most {rate.num_steps - optimizer.warmup_steps}",
        )
    if optimizer.ess_scale != "off" and not pipeline.has_anchor_pass:
        yield Problem(
            "optimizer.ess_scale",
            "the ratio of policy to rollout is not known before the update",
            got=f"{optimizer.ess_scale} with pipeline.behavior={pipeline.recovery}",
            expected="pipeline.behavior=snapshot or merged",
        )
    if learner.offload_optimizer and learner.backend == "megatron" and not learner.distributed_optimizer:
        yield Problem(
            "learner.distributed_optimizer",
            "Megatron-Core keeps state on the host where ranks share it",
            got="false with learner.offload_optimizer=true",
            expected="true",
        )
    for option in sorted(_OFFLOADING & optimizer.extra.keys()):
        yield Problem(
            f"optimizer.extra.{option}",
            "checkpoints find the state of this kind of optimizer only under a setting of its own",
            got=str(optimizer.extra[option]),
            expected="left out",
            fix="set learner.offload_optimizer=true",
        )
    for index, group in enumerate(optimizer.groups):
        try:
            re.compile(group.match)
        except re.error as error:
            yield Problem(
                f"optimizer.groups.{index}.match",
                f"not a regular expression: {error}",
                got=group.match,
                expected="one that Python's `re` accepts",
            )


def _parallel(learner: LearnerConfig) -> Iterator[Problem]:
    parallel = learner.parallel
    if parallel.virtual_pipeline is not None and parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield Problem(
            "learner.parallel.virtual_pipeline",
            "model chunks need a pipeline",
            got=f"{parallel.virtual_pipeline} chunks on 1 stage",
            expected="learner.parallel.pipeline of at least 2",
        )
    yield from pipeline_layout.problems(parallel)
    if parallel.tensor % parallel.expert_tensor:
        yield Problem(
            "learner.parallel.expert_tensor",
            "ranks that share an expert's matrices must forward micro-batches of one length, "
            "and those of data-parallel ranks differ",
            got=f"{parallel.expert_tensor} with learner.parallel.tensor={parallel.tensor}",
            expected=f"a divisor of {parallel.tensor}",
            fix="use learner.parallel.expert",
        )


def _layer_noise(
    noise: LayerNoiseConfig, correction: CorrectionConfig, loss: LossConfig, recovery: Recovery
) -> Iterator[Problem]:
    """The perturbed policy is compared with what sampled, never with an anchor that is not perturbed."""
    preset = preset_of(correction)
    facts = loss_facts(loss, preset)
    bypass = (preset is not None and preset.bypass) or recovery == "bypass"
    if noise.sigma and not (bypass or (facts and "engine" in facts.contains)):
        yield Problem(
            "learner.layer_noise.sigma",
            "only updates are perturbed, so current / proximal would be the noise",
            got=f"{noise.sigma} with correction.preset={correction.preset}",
            expected="0, or current / rollout as the one ratio",
            fix="choose a bypass_* preset",
        )
