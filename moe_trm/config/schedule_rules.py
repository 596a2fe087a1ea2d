"""Rules between settings of the schedule: modes, pushes, reuse and the proximal policy. See `moe_trm.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import Config
from moe_trm.methods.advantages import ADVANTAGES


def refusals(config: Config) -> Iterator[Problem]:
    """The reasons that these settings cannot work."""
    yield from _age(config)
    yield from _pushes(config)
    yield from _rolling(config)
    yield from _reuse(config)
    yield from _stream(config)
    if config.pipeline.proximal == "average":
        yield from _average(config)


def idle(config: Config) -> Iterator[tuple[str, str, bool, str]]:
    """Rows of the table of idle settings: section, key, whether it is idle, and why."""
    pipeline, rollout = config.pipeline, config.rollout
    reuse = ("max_uses", "reuse_tau", "reuse_correction")
    yield from (
        ("pipeline", key, not pipeline.reuse_groups, "pipeline.reuse_groups=0 uses nothing again") for key in reuse
    )
    yield "pipeline", "stream", config.learner.minibatches == 1, "learner.minibatches=1: the batch is one minibatch"
    yield "pipeline", "proximal_decay", pipeline.proximal == "start", "pipeline.proximal=start averages nothing"
    yield "pipeline", "rolling_push", len(rollout.urls) < 2, "one server has nobody to take turns with"
    yield "pipeline", "rolling_push", pipeline.mode == "sync", "nothing is sampled while pipeline.mode=sync pushes"


def _age(config: Config) -> Iterator[Problem]:
    pipeline = config.pipeline
    given, every = pipeline.max_staleness, pipeline.push_every
    if given is None:
        return
    if pipeline.mode != "async" and given != pipeline.default_staleness:
        yield Problem(
            "pipeline.max_staleness",
            f"pipeline.mode={pipeline.mode} fixes the age of its samples",
            got=str(given),
            expected=f"none, or {pipeline.default_staleness}",
            fix="leave it out, or set pipeline.mode=async",
        )
    if pipeline.mode == "async" and given < every - 1:
        yield Problem(
            "pipeline.max_staleness",
            "the last step before a push could train nothing: the newest weights that sample are older than the bound",
            got=f"{given} with pipeline.push_every={every}",
            expected=f"at least {every - 1}",
            fix="raise it, or lower pipeline.push_every",
        )


def _pushes(config: Config) -> Iterator[Problem]:
    every, evaluated = config.pipeline.push_every, config.train.eval_every
    if config.rollout.colocate and every > 1:
        yield Problem(
            "rollout.colocate",
            "an engine that lends its memory to the learner gets it back with a push, which not every step makes",
            got=f"true with pipeline.push_every={every}",
            expected="pipeline.push_every=1",
        )
    if evaluated % every and config.rollout.traits.has_weights and config.task.has_evaluation:
        yield Problem(
            "train.eval_every",
            "the engine is evaluated, which has the learner's weights only after a push",
            got=f"{evaluated} with pipeline.push_every={every}",
            expected=f"0, or a multiple of {every}",
        )


def _rolling(config: Config) -> Iterator[Problem]:
    if not config.pipeline.rolling_push:
        return
    if config.rollout.router:
        yield Problem(
            "pipeline.rolling_push",
            "behind a router nobody knows which server a sample reaches, so all servers get weights at the same time",
            got="true with rollout.router",
            expected="false, or no router",
        )
    if config.pipeline.partial == "interrupt":
        yield Problem(
            "pipeline.rolling_push",
            "an interrupted sample could go on under older weights than it began with, at a server that waits its turn",
            got="true with pipeline.partial=interrupt",
            expected="pipeline.partial=wait",
        )


def _reuse(config: Config) -> Iterator[Problem]:
    pipeline = config.pipeline
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


def _stream(config: Config) -> Iterator[Problem]:
    """Whoever needs the whole step before its first update cannot be given it in parts."""
    learner, optimizer, name = config.learner, config.optimizer, config.advantage.name
    if not config.pipeline.stream or learner.minibatches == 1:
        return
    prompts = config.rollout.prompts_per_step
    needs = [
        (f"learner.epochs={learner.epochs}, which goes over the whole step again", learner.epochs > 1),
        (f"optimizer.ess_scale={optimizer.ess_scale}, which weighs the whole step", optimizer.ess_scale != "off"),
        ("optimizer.surge_limit, which reads the step's mean length", optimizer.surge_limit is not None),
        (f"advantage.name={name}, which is whitened over the whole step", ADVANTAGES[name].whitens),
        ("rollout.colocate=true, where nothing is sampled while the learner works", config.rollout.colocate),
        (
            f"learner.minibatches={learner.minibatches}, which do not share {prompts} prompts evenly",
            prompts % learner.minibatches > 0,
        ),
    ]
    for need, found in needs:
        if found:
            yield Problem(
                "pipeline.stream",
                "a step that trains as its groups arrive has no whole before its first update",
                got=f"true with {need}",
                expected="false, or without that",
            )


def _average(config: Config) -> Iterator[Problem]:
    """Whoever reads the anchor as the policy that trains would read the average."""
    readers = [
        ("replay.mode=R2, which replays the routes of the anchor pass", config.replay.mode == "R2"),
        (f"pipeline.behavior={config.pipeline.behavior}", not config.pipeline.has_anchor_pass),
        ("kl.where=reward", config.kl.coef > 0 and config.kl.where == "reward"),
        (f"optimizer.ess_scale={config.optimizer.ess_scale}", config.optimizer.ess_scale != "off"),
        (f"advantage.name={config.advantage.name}", ADVANTAGES[config.advantage.name].reads_ratios),
    ]
    for reader, found in readers:
        if found:
            yield Problem(
                "pipeline.proximal",
                "the anchor is an average of weights here, and another setting needs that of the learner's own",
                got=f"average with {reader}",
                expected="start, or without that setting",
            )
