"""Rules between settings of the schedule: modes, pushes, reuse and the proximal policy. See `moe_trm.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import (
    AdvantageConfig,
    Config,
    KlConfig,
    LearnerConfig,
    OptimizerConfig,
    PipelineConfig,
    ReplayConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from moe_trm.methods.advantages import ADVANTAGES


def refusals(config: Config) -> Iterator[Problem]:
    """The reasons that these settings cannot work."""
    yield from _age(config.pipeline)
    yield from _pushes(config.pipeline, config.train, config.rollout, config.task)
    yield from _rolling(config.rollout, config.pipeline)
    yield from _reuse(config.pipeline)
    yield from _stream(config.learner, config.optimizer, config.rollout, config.advantage, config.pipeline)
    if config.pipeline.proximal == "average":
        yield from _average(config.replay, config.pipeline, config.optimizer, config.kl, config.advantage)


def idle(
    pipeline: PipelineConfig, rollout: RolloutConfig, learner: LearnerConfig
) -> Iterator[tuple[str, str, bool, str]]:
    """Rows of the table of idle settings: section, keys, whether they are idle, and why."""
    reuse = "max_uses reuse_tau reuse_priority reuse_correction"
    yield "pipeline", reuse, not pipeline.reuse_groups, "pipeline.reuse_groups=0 uses nothing again"
    yield "pipeline", "stream", learner.minibatches == 1, "learner.minibatches=1: the batch is one minibatch"
    yield "pipeline", "proximal_decay", pipeline.proximal == "start", "pipeline.proximal=start averages nothing"
    yield "pipeline", "rolling_push", len(rollout.urls) < 2, "one server has no other to take turns with"
    yield "pipeline", "rolling_push", pipeline.mode == "sync", "nothing is sampled while pipeline.mode=sync pushes"


def _age(pipeline: PipelineConfig) -> Iterator[Problem]:
    max_staleness, push_every = pipeline.max_staleness, pipeline.push_every
    if max_staleness is None:
        return
    if pipeline.mode != "async" and max_staleness != pipeline.default_staleness:
        yield Problem(
            "pipeline.max_staleness",
            f"pipeline.mode={pipeline.mode} fixes the age of its samples",
            got=str(max_staleness),
            expected=f"none, or {pipeline.default_staleness}",
            fix="leave it out, or set pipeline.mode=async",
        )
    if pipeline.mode == "async" and max_staleness < push_every - 1:
        yield Problem(
            "pipeline.max_staleness",
            "the last step before a push could train nothing: the newest weights that sample are older than the bound",
            got=f"{max_staleness} with pipeline.push_every={push_every}",
            expected=f"at least {push_every - 1}",
            fix="raise it, or lower pipeline.push_every",
        )


def _pushes(
    pipeline: PipelineConfig, train: TrainConfig, rollout: RolloutConfig, task: TaskConfig
) -> Iterator[Problem]:
    push_every, evaluated = pipeline.push_every, train.eval_every
    if rollout.colocate and push_every > 1:
        yield Problem(
            "rollout.colocate",
            "an engine that lends its memory to the learner gets it back with a push, which not every step makes",
            got=f"true with pipeline.push_every={push_every}",
            expected="pipeline.push_every=1",
        )
    if evaluated % push_every and rollout.traits.has_weights and task.has_evaluation:
        yield Problem(
            "train.eval_every",
            "the engine is evaluated, which has the learner's weights only after a push",
            got=f"{evaluated} with pipeline.push_every={push_every}",
            expected=f"0, or a multiple of {push_every}",
        )


def _rolling(rollout: RolloutConfig, pipeline: PipelineConfig) -> Iterator[Problem]:
    if not pipeline.rolling_push:
        return
    if rollout.router:
        yield Problem(
            "pipeline.rolling_push",
            "behind a router it is unknown which server a sample reaches, so all servers get weights at the same time",
            got="true with rollout.router",
            expected="false, or no router",
        )
    if pipeline.partial == "interrupt":
        yield Problem(
            "pipeline.rolling_push",
            "an interrupted sample could go on under older weights than it began with, at a server that waits its turn",
            got="true with pipeline.partial=interrupt",
            expected="pipeline.partial=wait",
        )


def _reuse(pipeline: PipelineConfig) -> Iterator[Problem]:
    if not pipeline.reuse_groups:
        return
    got = f"{pipeline.reuse_groups} with pipeline.mode={pipeline.mode}"
    if pipeline.staleness_limit == 0:
        yield Problem(
            "pipeline.reuse_groups",
            "what an earlier step trained is older than the bound on age",
            got=f"{got} and a bound of 0",
            expected="0, or pipeline.max_staleness of at least 1",
        )
    elif pipeline.mode == "one_step" and pipeline.push_every == 1:
        yield Problem(
            "pipeline.reuse_groups",
            "a sample is as old as the bound allows when it is trained first",
            got=got,
            expected="0, or pipeline.mode=async",
        )


def _stream(
    learner: LearnerConfig,
    optimizer: OptimizerConfig,
    rollout: RolloutConfig,
    advantage: AdvantageConfig,
    pipeline: PipelineConfig,
) -> Iterator[Problem]:
    """A method that needs the whole step before its first update cannot be given it in parts."""
    name = advantage.name
    if not pipeline.stream or learner.minibatches == 1:
        return
    prompts = rollout.prompts_per_step
    needs = [
        (f"learner.epochs={learner.epochs}, which goes over the whole step again", learner.epochs > 1),
        (f"optimizer.ess_scale={optimizer.ess_scale}, which weighs the whole step", optimizer.ess_scale != "off"),
        ("optimizer.surge_limit, which reads the step's mean length", optimizer.surge_limit is not None),
        (f"advantage.name={name}, which is whitened over the whole step", ADVANTAGES[name].whitens),
        ("rollout.colocate=true, where nothing is sampled while the learner works", rollout.colocate),
        (
            f"learner.minibatches={learner.minibatches}, which do not share {prompts} prompts evenly",
            prompts % learner.minibatches > 0,
        ),
    ]
    for need, is_set in needs:
        if is_set:
            yield Problem(
                "pipeline.stream",
                "a step that trains as its groups arrive has no whole before its first update",
                got=f"true with {need}",
                expected="false, or without that",
            )


def _average(
    replay: ReplayConfig, pipeline: PipelineConfig, optimizer: OptimizerConfig, kl: KlConfig, advantage: AdvantageConfig
) -> Iterator[Problem]:
    """A method that reads the anchor as the policy in training would read the average."""
    readers = [
        ("replay.mode=R2, which replays the routes of the anchor pass", replay.mode == "R2"),
        (f"pipeline.behavior={pipeline.behavior}", not pipeline.has_anchor_pass),
        (f"kl.where={kl.where}", kl.before_updates),
        (f"optimizer.ess_scale={optimizer.ess_scale}", optimizer.ess_scale != "off"),
        (f"advantage.name={advantage.name}", ADVANTAGES[advantage.name].reads_ratios),
    ]
    for reader, is_set in readers:
        if is_set:
            yield Problem(
                "pipeline.proximal",
                "the anchor is an average of weights here, and another setting needs that of the learner's own",
                got=f"average with {reader}",
                expected="start, or without that setting",
            )
