"""Rules between settings of the rollout side and of its overlap with training. See `moe_trm.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_trm.config.problems import Problem
from moe_trm.config.schema import (
    Config,
    KlConfig,
    PipelineConfig,
    RecordConfig,
    ReplayConfig,
    RolloutConfig,
    SyncConfig,
)
from moe_trm.runtime.addresses import in_the_clear

MASK_LIMIT = 4096
"""Kept ids per position that the rollout engine can return (SGLang's `--sampling-mask-max-tokens` default)."""


def refusals(config: Config) -> list[Problem]:
    """The reasons that these settings cannot work; empty when they can."""
    return [
        *_rollout(config.rollout, config.keeps_masks, config.record, config.sync),
        *_teacher(config.kl, config.rollout, config.keeps_masks),
        *_pipeline(config.pipeline, config.rollout, config.replay, config.sync),
    ]


def _trusted(rollout: RolloutConfig, servers: str, clear: Sequence[str]) -> Iterator[Problem]:
    """`clear`: addresses of `servers` to which the key is sent without encryption."""
    if clear and not rollout.trusted_network:
        yield Problem(
            "rollout.trusted_network",
            f"the key of {servers} would cross a network in the clear",
            got=", ".join(clear),
            expected="addresses of this machine, https://, or a network that nobody else listens on",
            fix="set rollout.trusted_network=true if it is such a network; else give the servers certificates",
        )


def _teacher(kl: KlConfig, rollout: RolloutConfig, keeps_masks: bool) -> Iterator[Problem]:
    if not kl.teacher:
        return
    yield from _trusted(rollout, "the teacher's servers", in_the_clear(kl.teacher))
    if keeps_masks:
        yield Problem(
            "sampling_mask.mode",
            "the teacher scores over the whole vocabulary, and the policy would over the kept ids",
            got="keep with kl.teacher",
            expected="off",
        )
    if rollout.temperature != 1:
        yield Problem(
            "rollout.temperature",
            "the teacher scores at temperature 1, as the policy must",
            got=f"{rollout.temperature} with kl.teacher",
            expected="1",
        )


def _rollout(rollout: RolloutConfig, keeps_masks: bool, record: RecordConfig, sync: SyncConfig) -> Iterator[Problem]:
    repeats = not rollout.traits.samples_live
    if repeats and not rollout.bundle:
        yield Problem(
            "rollout.bundle",
            f"rollout.engine={rollout.engine} repeats a recorded run and needs its folder",
            got="none",
            expected="a folder that a run with record.bundle wrote",
        )
    if repeats and rollout.bundle and rollout.bundle == record.bundle:
        yield Problem(
            "record.bundle",
            "a run cannot record into the bundle it reads",
            got=rollout.bundle,
            expected="another folder or none",
        )
    if rollout.url and rollout.urls:
        yield Problem(
            "rollout.urls",
            "one server and several cannot both be meant",
            got=rollout.url,
            expected="one of the two keys",
        )
    yield from _trusted(rollout, "the rollout servers", rollout.in_the_clear)
    if rollout.router and not rollout.attached:
        yield Problem(
            "rollout.router",
            "a router hands samples on, but weights have to be pushed to each server",
            got=f"{rollout.router} without rollout.urls",
            expected="the servers' own addresses in rollout.urls",
        )
    if rollout.router and rollout.router.rstrip("/") in [url.rstrip("/") for url in rollout.addresses]:
        yield Problem(
            "rollout.router",
            "a router is no rollout server: what is pushed to it would reach one of them",
            got=f"{rollout.router} in rollout.urls too",
            expected="the servers' own addresses in rollout.urls",
        )
    if len(rollout.urls) > 1 and sync.method == "distributed":
        yield Problem(
            "sync.method",
            "a broadcast reaches one rollout server",
            got=f"distributed with {len(rollout.urls)} rollout.urls",
            expected="disk, on storage that all servers see",
        )
    if keeps_masks and rollout.top_k is not None and rollout.top_k > MASK_LIMIT:
        yield Problem(
            "rollout.top_k",
            "the engine returns no more kept ids than its limit, so the mask would be incomplete",
            got=str(rollout.top_k),
            expected=f"at most {MASK_LIMIT}",
            fix="lower rollout.top_k or set sampling_mask.mode=off",
        )
    if rollout.temperature < (bound := rollout.traits.lowest_temperature):
        yield Problem(
            "rollout.temperature",
            f"below {bound:g} {rollout.engine} samples at another temperature than it is asked for",
            got=str(rollout.temperature),
            expected=f"at least {bound:g}",
        )
    if rollout.top_k == 1:
        yield Problem(
            "rollout.top_k",
            "one kept id is greedy decoding: nothing is sampled, and the engine's log-probs ignore the temperature",
            got="1",
            expected="none, or at least 2",
        )


def _pipeline(
    pipeline: PipelineConfig, rollout: RolloutConfig, replay: ReplayConfig, sync: SyncConfig
) -> Iterator[Problem]:
    if rollout.colocate and pipeline.mode != "sync":
        yield Problem(
            "rollout.colocate",
            "an engine that lends its memory to the learner cannot sample meanwhile",
            got=f"true with pipeline.mode={pipeline.mode}",
            expected="pipeline.mode=sync",
            fix="give the engine GPUs of its own, or train synchronously",
        )
    if rollout.colocate and rollout.router is not None:
        yield Problem(
            "rollout.colocate",
            "a router asks its servers for their health, and one that lent its memory dies of that",
            got=f"true with rollout.router={rollout.router}",
            expected="rollout.router=null, with which samples are shared among rollout.urls as well",
        )
    if not pipeline.has_anchor_pass and replay.mode == "R2":
        yield Problem(
            "pipeline.behavior",
            "R2 replays the routes of the anchor pass, which is left out",
            got=f"{pipeline.behavior} with replay.mode=R2",
            expected="snapshot or merged, or replay.mode=R3",
        )
    if pipeline.partial == "interrupt" and sync.method == "distributed":
        yield Problem(
            "pipeline.partial",
            "the ranks that broadcast wait for the engine, so there is nothing to gain from interrupting",
            got="interrupt with sync.method=distributed",
            expected="wait, or sync.method=disk",
        )
