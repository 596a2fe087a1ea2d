"""Rules of `exact`: what cannot agree to the last bit, or has not been made to, is refused.

See `moe_trm.config.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.engines import traits_of
from moe_trm.config.problems import Problem
from moe_trm.config.schema import LearnerConfig, PipelineConfig, ReplayConfig, RolloutConfig


def refusals(
    rollout: RolloutConfig,
    learner: LearnerConfig,
    replay: ReplayConfig,
    pipeline: PipelineConfig,
    *,
    keeps_masks: bool,
) -> Iterator[Problem]:
    """The reasons that a run with `exact: true` cannot be exact."""
    server, parallel = rollout.server, learner.parallel
    one_rank = "ranks that share a product add its parts up in an order of their own"
    needs: list[tuple[str, object, object, str]] = [
        ("learner.backend", learner.backend, "megatron", "the other learner has no sums in a fixed order"),
        ("learner.dtype", learner.dtype, server.dtype, "both engines need one arithmetic"),
        ("learner.fp8", learner.fp8, "none", "the rollout does not share the learner's scales"),
        ("learner.lora.rank", learner.lora.rank, 0, "merged adapters have not been compared to the last bit"),
        ("learner.layer_noise.sigma", learner.layer_noise.sigma, 0.0, "updates would have another forward pass"),
        *((f"learner.parallel.{key}", getattr(parallel, key), 1, one_rank) for key in SHARED),
        ("rollout.server.tensor_parallel", server.tensor_parallel, 1, one_rank),
        ("rollout.quantization", rollout.quantization, None, "weights differ on purpose"),
        ("rollout.fake_quantization", rollout.fake_quantization, None, "weights differ on purpose"),
        ("rollout.norm_noise", rollout.norm_noise, 0.0, "weights differ on purpose"),
        ("rollout.fake_router_noise", rollout.fake_router_noise, 0.0, "weights differ on purpose"),
        ("replay.mode", replay.mode, "R3", "flips are counted against the rollout's routes"),
        ("pipeline.mode", pipeline.mode, "sync", "the engine's part is to be known of every token when it trains"),
        ("pipeline.push_every", pipeline.push_every, 1, "the engine's part is to be known of every token"),
        ("pipeline.reuse_groups", pipeline.reuse_groups, 0, "the engine's part is to be known of every token"),
        ("pipeline.proximal", pipeline.proximal, "start", "the engine's part is to be known of every token"),
        ("pipeline.behavior", pipeline.recovery, "same", "the engine's part is to be known of every token"),
    ]
    if server.device == "cpu":
        needs.append(("rollout.server.dtype", server.dtype, "float32", "sums have a fixed order on a CPU in it alone"))
    if not traits_of(rollout.engine).fixed_order:
        yield Problem(
            "rollout.engine",
            "its sums have no order that the learner repeats",
            got=f"{rollout.engine} with exact=true",
            expected="an engine with the trait fixed_order",
        )
    for key, got, expected, why in needs:
        if got != expected:
            yield Problem(key, why, got=f"{got} with exact=true", expected=_text(expected))
    if keeps_masks or rollout.truncates:
        yield Problem(
            "sampling_mask.mode",
            "log-probs over a kept support have not been compared to the last bit",
            got="a kept support with exact=true",
            expected="sampling from the whole vocabulary (rollout.top_p=1, no top_k, no min_p)",
        )


SHARED = ("tensor", "pipeline", "context", "expert", "expert_tensor")
"""Keys of `learner.parallel` beside data-parallel ranks."""


def _text(expected: object) -> str:
    return "none" if expected is None else str(expected)
