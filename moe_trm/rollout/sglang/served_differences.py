"""Differences between the model of a config.json and the one that SGLang 0.5.23 computes from it.

SGLang reads fewer keys than transformers. It says nothing about the others, and about layers that it fills with random
weights. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.models.deepseek_v3 import LATENT_EPSILON
from moe_trm.models.family import Family, HfConfig
from moe_trm.models.hf_config import LAYER_KEYS, head_dim, moe_layers, rotary_share
from moe_trm.models.registry import find_family

READ_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Qwen3MoeForCausalLM": (),
        "OlmoeForCausalLM": (),
        "MixtralForCausalLM": (),
        "MiniMaxM2ForCausalLM": (),
        "Qwen3NextForCausalLM": (),
        "Qwen3_5MoeForCausalLM": (),
        "GptOssForCausalLM": (),
        "Glm4MoeForCausalLM": ("first_k_dense_replace",),
        "Glm4MoeLiteForCausalLM": ("first_k_dense_replace",),
        "DeepseekV3ForCausalLM": ("first_k_dense_replace", "moe_layer_freq"),
        "DeepseekV32ForCausalLM": ("first_k_dense_replace", "moe_layer_freq"),
        "GlmMoeDsaForCausalLM": ("first_k_dense_replace", "moe_layer_freq"),
    }
)
"""Those of `LAYER_KEYS` that SGLang reads, by architecture. Without any, every layer is a mixture of experts."""
_SAID = MappingProxyType({"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True})
"""Settings that MiniMax-M2 always has in transformers, and in SGLang where config.json says so."""
HARMLESS_EPSILON = 1e-5
"""Difference of two epsilons up to which log-probs of tiny models were less than 1e-3 nats apart."""
_INTERVAL = "full_attention_interval"
VISION_LEVELS = 3
"""Outputs of a vision tower that SGLang's Qwen3-VL-MoE adds to the first text layers."""
ROTATED_HEADS = (64, 128, 256, 512)
"""Head sizes of the CUDA kernel by which SGLang rotates keys and stores them in a bfloat16 cache."""
_EVERY_NORM = 1e-5
"""SGLang's epsilon in every norm of OLMoE."""


def config_overrides(hf: HfConfig) -> dict[str, int]:
    """Keys that SGLang needs in config.json and transformers does not write: every how many layers attention is full.

    SGLang takes the layers between them for layers with the gated delta rule. Empty of other families.
    """
    family = find_family(hf)
    if family is None or "gated delta" not in family.attention_kinds(hf) or _INTERVAL in hf:
        return {}
    return {_INTERVAL: 1 + _full_layers(family, hf)[0]} if _full_layers(family, hf) else {}


def check_intervals(hf: HfConfig, where: str) -> None:
    """Refuse layers with the gated delta rule elsewhere than between every so many layers with full attention.

    Raises:
        CheckpointError: SGLang would compute other layers with full attention than transformers.
    """
    family = find_family(hf)
    if family is None or "gated delta" not in family.attention_kinds(hf):
        return
    interval = int({**config_overrides(hf), **hf}.get(_INTERVAL, 0))
    built = tuple(range(interval - 1, int(hf["num_hidden_layers"]), interval)) if interval else ()
    if not built or built != _full_layers(family, hf):
        raise CheckpointError(
            "SGLang 0.5.23 serves another model than this one: it knows no layer_types",
            where=f"{where}, layer_types and {_INTERVAL}",
            got=f"full attention in layers {_listed(_full_layers(family, hf))}",
            expected=f"full attention in every n-th layer, {_listed(built)} with this {_INTERVAL}",
            fix="Train this model with rollout.engine=bundle, or with an engine of your own.",
        )


def _full_layers(family: Family, hf: HfConfig) -> tuple[int, ...]:
    return tuple(i for i in range(int(hf["num_hidden_layers"])) if family.attention(hf, i).kind == "full")


def check_layers(hf: HfConfig, where: str) -> None:
    """Refuse a model with dense layers that SGLang would fill with experts of random weights.

    Raises:
        CheckpointError: SGLang would build other layers as mixtures of experts than config.json says.
    """
    architecture = (hf.get("architectures") or [""])[0]
    if architecture not in READ_KEYS:
        return
    declared = moe_layers(hf)
    built = moe_layers({key: hf[key] for key in hf if key not in LAYER_KEYS or key in READ_KEYS[architecture]})
    if declared != built:
        raise CheckpointError(
            "SGLang 0.5.23 serves another model than this one: it does not read which layers are dense",
            where=f"{where}, {' and '.join(key for key in LAYER_KEYS if key in hf)}",
            got=f"mixtures of experts in layers {_listed(declared)}",
            expected=f"mixtures in layers {_listed(built)}, as SGLang builds them: "
            "those without weights in the checkpoint would be random",
            fix="Train this model with rollout.engine=bundle, or with an engine of your own that serves dense layers.",
        )


def check_cuda_kernels(hf: HfConfig, dtype: str, where: str, *, deterministic: bool) -> None:
    """Refuse what SGLang's CUDA kernels cannot compute. Its own words come while it captures graphs, and name no key.

    `deterministic`: its batch-invariant kernels compute the norms.

    Raises:
        ConfigError: "rmsnorm failed to dispatch data type Float".
        CheckpointError: "save kv cache is not supported for fallback_rotary_embedding".
    """
    if dtype == "float32" and not deterministic:
        raise ConfigError(
            "SGLang 0.5.23 has no norms in float32 on CUDA",
            where="rollout.server.dtype",
            got=dtype,
            expected="bfloat16 or float16 on CUDA",
            fix="Set rollout.server.dtype=bfloat16, or serve a small model with rollout.server.device=cpu.",
        )
    if hf.get("architectures") == ["Qwen3MoeForCausalLM"] and dtype == "bfloat16" and head_dim(hf) not in ROTATED_HEADS:
        raise CheckpointError(
            "SGLang 0.5.23 does not serve heads of this size on CUDA in bfloat16",
            where=f"{where}, head_dim",
            got=str(head_dim(hf)),
            expected=f"one of {', '.join(map(str, ROTATED_HEADS))}, which published models have",
            fix="Serve a small model with rollout.server.device=cpu.",
        )


def check_cpu_kernels(hf: HfConfig, where: str) -> None:
    """Refuse Mamba-2 layers on a CPU: SGLang's mixer has its scan and its update of states in Triton alone.

    Raises:
        CheckpointError: config.json has `mamba_num_heads`.
    """
    if "mamba_num_heads" in hf:
        raise CheckpointError(
            "SGLang 0.5.23 has no Mamba layers on a CPU: their kernels are Triton's",
            where=f"{where}, mamba_num_heads",
            got=f"{hf['mamba_num_heads']} on a CPU",
            expected="a server on a GPU",
            fix="Roll out on a GPU, or train this model with rollout.engine=bundle.",
        )


def check_options(hf: HfConfig, where: str) -> None:
    """Refuse a MiniMax-M2 that SGLang would serve with another router, another rotation or without norms.

    Raises:
        CheckpointError: a key that SGLang needs is absent, or has another value.
    """
    if hf.get("architectures") != ["MiniMaxM2ForCausalLM"]:
        return
    expected = {**_SAID, "rotary_dim": int(rotary_share(hf) * head_dim(hf))}
    for key, value in expected.items():
        if hf.get(key) != value:
            raise CheckpointError(
                "SGLang 0.5.23 serves another model than this one",
                where=f"{where}, {key}",
                got=hf.get(key, "no such key"),
                expected=value,
                fix="Use the published config.json; transformers takes the value for granted, and SGLang does not.",
            )


def check_epsilons(hf: HfConfig, where: str) -> None:
    """Refuse norms with an epsilon that is far from the one SGLang takes.

    Raises:
        CheckpointError: they are more than `HARMLESS_EPSILON` apart.
    """
    if (epsilons := _epsilons(hf)) is not None and abs(epsilons[1] - epsilons[2]) > HARMLESS_EPSILON:
        norms, learner, served = epsilons
        raise CheckpointError(
            f"SGLang 0.5.23 computes {norms} with another epsilon than transformers and the learners",
            where=f"{where}, rms_norm_eps",
            got=f"{served:g} in the engine, {learner:g} in the learner",
            expected=f"a difference of at most {HARMLESS_EPSILON:g}",
            fix="Check rms_norm_eps: published checkpoints of this architecture have 1e-6 or 1e-5.",
        )


def check_vision_levels(full_config: HfConfig, where: str) -> None:
    """Refuse prompts with pictures for a model whose vision tower hands another number of levels to the text layers.

    SGLang's Qwen3-VL-MoE adds three (`deepstack_embed_to_decoder_layer`), whatever config.json says: it leaves a fourth
    out, and the first picture ends a server of fewer.

    Raises:
        CheckpointError: `deepstack_visual_indexes` has another number of layers than three.
    """
    vision = full_config.get("vision_config") or {}
    levels = vision.get("deepstack_visual_indexes", range(VISION_LEVELS))  # transformers' default has three, too
    if len(levels) != VISION_LEVELS:
        raise CheckpointError(
            "SGLang 0.5.23 adds three levels of the vision tower to the text layers, whatever config.json says",
            where=f"{where}, vision_config.deepstack_visual_indexes",
            got=f"{len(levels)} levels with task.image_field",
            expected=f"{VISION_LEVELS}",
            fix="Use a release, or leave task.image_field out: prompts of text alone do not pass the tower.",
        )


def remark_on_epsilons(hf: HfConfig) -> str:
    """The difference that `check_epsilons` lets pass, in words; empty where there is none."""
    if (epsilons := _epsilons(hf)) is None or epsilons[1] == epsilons[2]:
        return ""
    norms, learner, served = epsilons
    return f"SGLang 0.5.23 computes {norms} with epsilon {served:g}, transformers and the learners with {learner:g}"


def _epsilons(hf: HfConfig) -> tuple[str, float, float] | None:
    """The norms in which epsilons can differ, the learners' epsilon and SGLang's; None: no such norms."""
    if "rms_norm_eps" not in hf:
        return None
    if hf.get("architectures") == ["OlmoeForCausalLM"]:
        return "every norm", float(hf["rms_norm_eps"]), _EVERY_NORM
    if hf.get("kv_lora_rank"):
        return "the norms of latent attention", LATENT_EPSILON, float(hf["rms_norm_eps"])
    return None


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers)) or "none"
