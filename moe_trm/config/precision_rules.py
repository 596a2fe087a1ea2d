"""Rules between the arithmetic of the rollout and that of the learner. See `moe_trm.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import Config

CORRECTION = "correction.rules=[{name: trm_max, target_reject_rate: 0.05}]"
"""What to begin with where the rollout is a policy of its own."""


def refusals(config: Config) -> Iterator[Problem]:
    """Why these settings cannot work."""
    initial, rollout = config.learner.loss_scale.initial, config.rollout
    if initial & (initial - 1):
        yield Problem(
            "learner.loss_scale.initial",
            "only a power of two divides gradients without rounding them",
            got=str(initial),
            expected=f"{1 << (initial.bit_length() - 1)} or {1 << initial.bit_length()}",
        )
    if rollout.quantization is None or rollout.engine == "bundle":
        return
    if rollout.server.device == "cpu" and not rollout.attached:
        yield Problem(
            "rollout.quantization",
            "SGLang's quantised kernels need CUDA (on a CPU they ask for AMX and operators that its wheel lacks)",
            got=f"{rollout.quantization} with rollout.server.device=cpu",
            expected="none on a CPU",
        )
    if config.sync.verify:
        yield Problem(
            "sync.verify",
            "the engine's checksums are those of the weights it rounded, not of those that were sent",
            got=f"true with rollout.quantization={rollout.quantization}",
            expected="false",
            fix="set sync.verify=false; whether pushes arrive then shows in engine/k3_kl alone",
        )


def surprises(config: Config) -> Iterator[str]:
    """What does not do what it seems to."""
    learner, rollout = config.learner, config.rollout
    if rollout.quantization is not None:
        yield (
            f"rollout.quantization={rollout.quantization}: the rollout is a behaviour policy of its own, with rounded weights; "
            "engine/* measures it against the learner's policy"
        )
        if not config.correction.rules and config.correction.preset is None:
            yield f"rollout.quantization={rollout.quantization} without a correction trains on another policy's samples as if they were the learner's own: try {CORRECTION}"
        if config.replay.mode == "none":
            yield f"rollout.quantization={rollout.quantization} with replay.mode=none: rounded routers choose other experts more often, and nothing brings them together; R3 does"
    halves = {learner.dtype, rollout.server.dtype}
    if halves == {"bfloat16", "float16"} and rollout.engine == "sglang":
        yield f"learner.dtype={learner.dtype} with rollout.server.dtype={rollout.server.dtype} aligns nothing: the engines differ by bfloat16's rounding; float16 on both sides is eight times finer"
    if "loss_scale" in learner.model_fields_set and learner.dtype != "float16":
        yield f"learner.loss_scale has no effect: learner.dtype={learner.dtype} needs none"
