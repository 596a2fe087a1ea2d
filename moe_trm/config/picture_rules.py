"""Rules of `task.image_field`: what is not known to work with pictures is refused. See `moe_trm.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import Config, LearnerConfig


def refusals(config: Config) -> Iterator[Problem]:
    """The reasons that a run whose prompts have pictures cannot work."""
    if not config.task.has_pictures:
        return
    learner, rollout, server = config.learner, config.rollout, config.rollout.server
    alone = "one answer to each prompt is asked with its pictures"
    needs: list[tuple[str, object, tuple[object, ...], str]] = [
        ("task.name", config.task.name, ("jsonl",), "other tasks have no pictures"),
        ("learner.backend", learner.backend, ("deepspeed",), "the other learner builds no vision tower"),
        ("learner.deepspeed.zero_stage", learner.deepspeed.zero_stage, (1, 2), "a vision tower is not partitioned"),
        ("learner.lora.rank", learner.lora.rank, (0,), "adapters are of the text model alone"),
        ("learner.layer_noise.sigma", learner.layer_noise.sigma, (0.0,), "noise is on the text model alone"),
        ("batch.layout", config.batch.layout, ("auto", "padded"), "attention over packs has no positions of pictures"),
        ("rollout.function", rollout.function, (None,), alone),
        ("rollout.agent", rollout.agent, (None,), alone),
        ("rollout.router", rollout.router, (None,), "a router is not known to hand pictures on"),
        ("rollout.quantization", rollout.quantization, (None,), "rounding has not been tried with a vision tower"),
        ("rollout.fake_quantization", rollout.fake_quantization, (None,), "rounding has not been tried here"),
        ("rollout.norm_noise", rollout.norm_noise, (0.0,), "noise has not been tried with a vision tower"),
        ("rollout.fake_router_noise", rollout.fake_router_noise, (0.0,), "noise has not been tried here"),
        ("rollout.colocate", rollout.colocate, (False,), "a push would not bring the vision tower back"),
        ("rollout.server.random_weights", server.random_weights, (False,), "a push does not bring the vision tower"),
        ("rollout.server.tensor_parallel", server.tensor_parallel, (1,), "shares of a vision tower are not known here"),
        ("sync.method", config.sync.method, ("disk",), "broadcasts have not been tried with a vision tower"),
        ("kl.teacher", config.kl.teacher, ((), None), "the teacher is sent no pictures"),
        ("probe.bank", config.probe.bank, (0,), "fixed texts are prefilled without pictures"),
        ("exact", config.exact, (False,), "exact sums have not been tried with a vision tower"),
    ]
    if not rollout.traits.takes_pictures:
        yield Problem(
            "rollout.engine",
            "this engine is not known to take pictures with a prompt",
            got=f"{rollout.engine} with task.image_field={config.task.image_field}",
            expected="one that does (`takes_pictures`)",
        )
    for key, got, allowed, why in needs:
        if got not in allowed:
            words = " or ".join("none" if value in (None, ()) else str(value).lower() for value in allowed[:2])
            yield Problem(key, why, got=f"{got} with task.image_field={config.task.image_field}", expected=words)
    if config.sync.verify and not config.sync.prove_every and rollout.traits.has_servers:
        yield Problem(
            "sync.prove_every",
            "checksums of a model with a vision tower are not predicted, so every push is proved by use",
            got=f"0 with task.image_field={config.task.image_field}",
            expected="1 or more",
        )


def idle_settings(learner: LearnerConfig, *, has_pictures: bool) -> Iterator[str]:
    """Settings that change nothing without pictures."""
    if not has_pictures and "freeze_vision" in learner.model_fields_set:
        yield "learner.freeze_vision has no effect: without task.image_field the text model alone is trained"
