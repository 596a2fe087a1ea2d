"""Rules between the rollout's arithmetic and the learner's. See `moe_trm.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import (
    BatchConfig,
    CorrectionConfig,
    LearnerConfig,
    ProbeConfig,
    ReplayConfig,
    RolloutConfig,
    SyncConfig,
)

CORRECTION = "correction.rules=[{name: trm_max, target_reject_rate: 0.05}]"
"""The correction to begin with where the rollout is a policy of its own."""


def refusals(rollout: RolloutConfig, sync: SyncConfig, learner: LearnerConfig, batch: BatchConfig) -> Iterator[Problem]:
    """The reasons that these settings cannot work."""
    initial = learner.loss_scale.initial
    if initial & (initial - 1):
        yield Problem(
            "learner.loss_scale.initial",
            "only a power of two divides gradients without rounding them",
            got=str(initial),
            expected=f"{1 << (initial.bit_length() - 1)} or {1 << initial.bit_length()}",
        )
    yield from _fp8(learner)
    if learner.fp8 != "none" and batch.layout == "packed":
        yield Problem(
            "batch.layout",
            "8-bit products over packs have not been proved: their scales would see other columns",
            got=f"packed with learner.fp8={learner.fp8}",
            expected="padded",
            fix="set batch.layout=padded, or learner.fp8=none",
        )
    yield from _deterministic(rollout)
    yield from _round_like_rollout(rollout, learner)
    if rollout.quantization is not None and rollout.fake_quantization is not None:
        yield Problem(
            "rollout.fake_quantization",
            "weights that the learner has rounded would be rounded once more by the engine",
            got=f"{rollout.fake_quantization} with rollout.quantization={rollout.quantization}",
            expected="one of the two",
        )
    if rollout.quantization is None or not rollout.traits.has_weights:
        return
    if rollout.server.device == "cpu" and rollout.starts_server:
        yield Problem(
            "rollout.quantization",
            "SGLang's quantised kernels need CUDA (on a CPU they ask for AMX and operators that its wheel lacks)",
            got=f"{rollout.quantization} with rollout.server.device=cpu",
            expected="none on a CPU",
            fix="set rollout.quantization=null, or rollout.url to a server that runs elsewhere",
        )
    if sync.verify:
        yield Problem(
            "sync.verify",
            "the engine's checksums are those of the weights it rounded, not of those that were sent",
            got=f"true with rollout.quantization={rollout.quantization}",
            expected="false",
            fix="set sync.verify=false; whether pushes arrive then shows in engine/k3_kl alone",
        )


def _deterministic(rollout: RolloutConfig) -> Iterator[Problem]:
    if not rollout.server.deterministic:
        return
    if rollout.server.device == "cpu" and rollout.starts_server:
        yield Problem(
            "rollout.server.deterministic",
            "SGLang's deterministic kernels need CUDA",
            got="true with rollout.server.device=cpu",
            expected="false on a CPU",
            fix="set rollout.server.deterministic=false, or rollout.url to a server that runs elsewhere",
        )
    if rollout.min_p > 0:
        yield Problem(
            "rollout.min_p",
            "SGLang does not sample with a seed and a bound on the probability",
            got=f"{rollout.min_p} with rollout.server.deterministic=true",
            expected="0",
        )


def _round_like_rollout(rollout: RolloutConfig, learner: LearnerConfig) -> Iterator[Problem]:
    key = "learner.round_like_rollout"
    if not learner.round_like_rollout:
        return
    if rollout.quantization is not None:
        yield Problem(
            key,
            "the learner cannot repeat what the engine does to the weights it was sent",
            got=f"true with rollout.quantization={rollout.quantization}",
            expected="rollout.fake_quantization, which the learner does itself",
        )
    if learner.backend == "deepspeed" and learner.deepspeed.zero_stage == 3:
        yield Problem(
            key,
            "ranks hold parts of output channels, and gather them anew in each pass",
            got="true with learner.deepspeed.zero_stage=3",
            expected="stage 1 or 2",
        )
    elif (reason := unrepeatable(learner, rollout)) is not None:
        setting, _, why = reason.partition(": ")
        yield Problem(
            key, why, got=f"true with rollout.fake_quantization={rollout.fake_quantization}", expected=setting
        )


def _fp8(learner: LearnerConfig) -> Iterator[Problem]:
    if learner.fp8 == "none":
        return
    needs = [
        ("backend", "megatron", "8-bit products are those of Megatron-Core's layers"),
        ("dtype", "bfloat16", "what 8-bit products leave over computes in bfloat16"),
    ]
    for key, needed, why in needs:
        if getattr(learner, key) != needed:
            yield Problem(
                f"learner.{key}",
                why,
                got=f"{getattr(learner, key)} with learner.fp8={learner.fp8}",
                expected=needed,
            )
    if learner.transformer_engine == "off":
        yield Problem(
            "learner.transformer_engine",
            "8-bit products are Transformer Engine's",
            got=f"off with learner.fp8={learner.fp8}",
            expected="auto or on",
        )
    if learner.fp8 == "delayed" and learner.fp8_bfloat16_layers and "fp8_bfloat16_layers" in learner.model_fields_set:
        yield Problem(
            "learner.fp8_bfloat16_layers",
            "delayed scaling leaves no layer out",
            got=f"{learner.fp8_bfloat16_layers} with learner.fp8=delayed",
            expected="0, or left out",
        )


def unrepeatable(learner: LearnerConfig, rollout: RolloutConfig) -> str | None:
    """The reason that the probe cannot measure fake quantisation, or None. A scale needs all its weights."""
    if rollout.fake_quantization is None:
        return None
    if rollout.fake_quantization_block is not None:
        return "rollout.fake_quantization_block: the learner stores its matrices in other blocks than the checkpoint"
    if learner.backend == "megatron" and max(learner.parallel.tensor, learner.parallel.expert_tensor) > 1:
        return "learner.parallel: tensor-parallel ranks hold parts of output channels"
    if learner.backend == "deepspeed" and learner.deepspeed.zero_stage == 3:
        return "learner.deepspeed.zero_stage=3: ranks hold parts of output channels"
    return None


def surprises(
    learner: LearnerConfig,
    rollout: RolloutConfig,
    replay: ReplayConfig,
    probe: ProbeConfig,
    correction: CorrectionConfig,
) -> Iterator[str]:
    """Settings whose effect differs from what one expects."""
    yield from _rounded_rollouts(rollout, replay, probe, correction, learner)
    yield from _noisy_routers(rollout, replay, probe)
    narrows = learner.dtype == "float32" != rollout.server.dtype
    if learner.round_like_rollout and rollout.fake_quantization is None and not narrows:
        yield (
            "learner.round_like_rollout has no effect: a push of this run rounds nothing "
            f"(rollout.server.dtype={rollout.server.dtype}, no rollout.fake_quantization)"
        )
    if rollout.server.fp32_head and rollout.server.dtype == "float32":
        yield "rollout.server.fp32_head has no effect: rollout.server.dtype=float32 computes everything so"
    if rollout.fake_quantization_block is not None and rollout.fake_quantization is None:
        yield "rollout.fake_quantization_block has no effect: rollout.fake_quantization is not set"
    if learner.fp8 == "delayed":
        yield (
            "learner.fp8=delayed takes its scales from earlier passes: the first update does not repeat the scoring "
            "pass bit for bit, and update/first_nonzero_fraction is not 0; tensorwise does"
        )
    if learner.fp8 != "none" and rollout.quantization is None and rollout.traits.samples_live:
        yield (
            f"learner.fp8={learner.fp8}: engine/* now contains the learner's own 8-bit rounding, "
            "which the rollout does not share; rollout.quantization=fp8 rounds there too"
        )
    for noise, depends in (
        ("norm_noise", ("norm_noise_end", "norm_noise_stages")),
        ("fake_router_noise", ("fake_router_noise_each_push",)),
    ):
        idle_keys = [f"rollout.{key}" for key in depends if key in rollout.model_fields_set]
        if idle_keys and not getattr(rollout, noise):
            yield f"{', '.join(idle_keys)} has no effect: rollout.{noise}=0"
    idle = [
        ("transformer_engine", learner.backend != "megatron", f"learner.backend={learner.backend}"),
        ("fp8_bfloat16_layers", learner.fp8 == "none", "learner.fp8=none"),
    ]
    for key, is_idle, reason in idle:
        if is_idle and key in learner.model_fields_set:
            yield f"learner.{key} has no effect: {reason}"
    halves = {learner.dtype, rollout.server.dtype}
    if halves == {"bfloat16", "float16"} and rollout.traits.samples_live:
        yield (
            f"learner.dtype={learner.dtype} with rollout.server.dtype={rollout.server.dtype} aligns nothing: "
            "the engines differ by bfloat16's rounding; float16 on both sides is eight times finer"
        )
    if "loss_scale" in learner.model_fields_set and learner.dtype != "float16":
        yield f"learner.loss_scale has no effect: learner.dtype={learner.dtype} needs none"


def _rounded_rollouts(
    rollout: RolloutConfig,
    replay: ReplayConfig,
    probe: ProbeConfig,
    correction: CorrectionConfig,
    learner: LearnerConfig,
) -> Iterator[str]:
    if rollout.rounds_weights is None:
        return
    setting = f"rollout.norm_noise={rollout.norm_noise}"
    for key in ("fake_quantization", "quantization"):
        if (value := getattr(rollout, key)) is not None:
            setting = f"rollout.{key}={value}"
    yield (
        f"{setting}: the rollout is a behaviour policy of its own, with other weights; engine/* measures it against "
        "the learner's policy"
    )
    if not correction.rules and correction.preset is None and not learner.round_like_rollout:
        yield (
            f"{setting} without a correction trains on another policy's samples as if they were the learner's own: "
            f"try {CORRECTION}"
        )
    if replay.mode == "none":
        yield (
            f"{setting} with replay.mode=none: other weights choose other experts more often, and nothing brings them "
            "together; R3 does"
        )
    if probe.every and (reason := unrepeatable(learner, rollout)) is not None:
        yield f"probe/quantization_k3_kl is not measured: {reason}"
    elif probe.every and rollout.norm_noise and rollout.fake_quantization is not None:
        yield "probe/quantization_k3_kl is not measured: rollout.norm_noise is not repeated by the learner"


def _noisy_routers(rollout: RolloutConfig, replay: ReplayConfig, probe: ProbeConfig) -> Iterator[str]:
    if not rollout.fake_router_noise:
        return
    yield (
        f"AN EXPERIMENT, NOT A TRAINING RUN: rollout.fake_router_noise={rollout.fake_router_noise} makes the engine's "
        "routers choose other experts than the learner's, on purpose; rewards and evaluations are of the noisy policy"
    )
    if replay.mode != "none" and replay.max_local_flip_rate < 1:
        yield (
            f"replay.max_local_flip_rate={replay.max_local_flip_rate:g} stops the run where the noise flips more of a "
            "layer's expert sets: replay.max_local_flip_rate=1.0 measures them"
        )
    if probe.every:
        yield "the parts of rounding in probe/* are not measured: rollout.fake_router_noise is not repeated"
