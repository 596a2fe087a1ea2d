"""Published MoE releases by name: which config.json of `moe_trm/models/published` they resemble, and what differs.

Sizes that no refusal depends on are those of the resembling model. Sources: the releases' config.json as issues and
serving guides quote them; architectures as SGLang and vLLM register them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.published_models import published_config

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        },
    },
}  # fmt: skip
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
V3, V32, GLM5, QWEN3, QWEN35, MINIMAX = (
    "deepseek_v3",
    "deepseek_v3_2",
    "glm_5",
    "qwen3_235b_a22b",
    "qwen3_5_35b_a3b",
    "minimax_m2",
)
_RELEASES: Mapping[str, tuple[str, str, Mapping[str, Any] | None]] = {
    "MiniMax-M2.5": (MINIMAX, "", FP8),
    "MiniMax-M2.7": (MINIMAX, "", FP8),
    "MiniMax-M3": (MINIMAX, "MiniMaxM3ForCausalLM", FP8),
    "Qwen3-235B-A22B-FP8": (QWEN3, "", FP8),
    "Qwen3-235B-A22B": (QWEN3, "", None),
    "Qwen3-30B-A3B-FP8": ("qwen3_30b_a3b", "", FP8),
    "Qwen3-30B-A3B": ("qwen3_30b_a3b", "", None),
    "Qwen3-Coder-480B-A35B-Instruct": (QWEN3, "", None),
    "Qwen3-VL-235B-A22B-Instruct": (QWEN3, "+Qwen3VLMoeForConditionalGeneration", None),
    "Qwen3-VL-30B-A3B-Instruct": ("qwen3_30b_a3b", "+Qwen3VLMoeForConditionalGeneration", None),
    "Qwen3.5-122B-A10B": (QWEN35, "", None),
    "Qwen3.5-35B-A3B": (QWEN35, "", None),
    "Qwen3.5-397B-A17B": (QWEN35, "", None),
    "MiMo-V2-Flash": (MINIMAX, "MiMoV2FlashForCausalLM", FP8),
    "DeepSeek-R1": (V3, "", FP8),
    "DeepSeek-V3.2": (V32, "", FP8),
    "DeepSeek-V3": (V3, "", FP8),
    "DeepSeek-V4-Flash": (V32, "DeepseekV4ForCausalLM", FP8),
    "DeepSeek-V4-Pro": (V32, "DeepseekV4ForCausalLM", FP8),
    "gemma-4-26B-A4B": (QWEN3, "+Gemma4ForConditionalGeneration", None),
    "Llama-4-Maverick-17B-128E-Instruct": (QWEN3, "+Llama4ForConditionalGeneration", None),
    "Llama-4-Scout-17B-16E-Instruct": (QWEN3, "+Llama4ForConditionalGeneration", None),
    "Mixtral-8x22B-v0.1": ("mixtral_8x7b", "", None),
    "Mixtral-8x7B-v0.1": ("mixtral_8x7b", "", None),
    "Kimi-K2-Instruct": ("kimi_k2", "", FP8),
    "Kimi-K2.5": ("kimi_k2", "+KimiK25ForConditionalGeneration", INT4),
    "Kimi-K3": ("kimi_k2", "+KimiK3ForConditionalGeneration", COMPRESSED),
    "DeepSeek-V3.1-NVFP4": (V3, "", NVFP4),
    "DeepSeek-V3.2-NVFP4": (V32, "", NVFP4),
    "DeepSeek-V4-Flash-NVFP4": (V32, "DeepseekV4ForCausalLM", NVFP4),
    "DeepSeek-V4-Pro-NVFP4": (V32, "DeepseekV4ForCausalLM", NVFP4),
    "GLM-5-NVFP4": (GLM5, "", NVFP4),
    "GLM-5.1-NVFP4": (GLM5, "", NVFP4),
    "GLM-5.2-NVFP4": (GLM5, "", NVFP4),
    "Gemma-4-26B-A4B-NVFP4": (QWEN3, "+Gemma4ForConditionalGeneration", NVFP4),
    "Gemma-4-31B-IT-NVFP4": (QWEN3, "+Gemma4ForConditionalGeneration", NVFP4),
    "Kimi-K2.5-NVFP4": ("kimi_k2", "+KimiK25ForConditionalGeneration", NVFP4),
    "Kimi-K2.6-NVFP4": ("kimi_k2", "+KimiK25ForConditionalGeneration", NVFP4),
    "Kimi-K2.7-Code-NVFP4": ("kimi_k2", "+KimiK25ForConditionalGeneration", NVFP4),
    "MiniMax-M2.5-NVFP4": (MINIMAX, "", NVFP4),
    "MiniMax-M2.7-NVFP4": (MINIMAX, "", NVFP4),
    "MiniMax-M3-NVFP4": (MINIMAX, "+MiniMaxM3SparseForConditionalGeneration", NVFP4),
    "Nemotron-3-Nano-30B-A3B-BF16": (QWEN3, "NemotronHForCausalLM", None),
    "Nemotron-3-Nano-30B-A3B-NVFP4": (QWEN3, "NemotronHForCausalLM", NVFP4),
    "Nemotron-3-Super-120B-A12B-FP8": (QWEN3, "NemotronHForCausalLM", MODELOPT_FP8),
    "Nemotron-3-Super-120B-A12B-NVFP4": (QWEN3, "NemotronHForCausalLM", NVFP4),
    "Nemotron-3-Ultra-550B-A55B-BF16": (QWEN3, "NemotronHForCausalLM", None),
    "Nemotron-3-Ultra-550B-A55B-FP8": (QWEN3, "NemotronHForCausalLM", MODELOPT_FP8),
    "Nemotron-3-Ultra-550B-A55B-NVFP4": (QWEN3, "NemotronHForCausalLM", NVFP4),
    "Nemotron-3.5-Lightning-30B-A3B-NVFP4": (QWEN3, "NemotronHForCausalLM", NVFP4),
    "Qwen3-235B-A22B-NVFP4": (QWEN3, "", NVFP4),
    "Qwen3.5-122B-A10B-NVFP4": (QWEN35, "", NVFP4),
    "Qwen3.5-397B-A17B-NVFP4": (QWEN35, "", NVFP4),
    "Qwen3.6-35B-A3B-NVFP4": (QWEN35, "", NVFP4),
    "gpt-oss-120b": ("gpt_oss_120b", "", {"quant_method": "mxfp4"}),
    "gpt-oss-20b": ("gpt_oss_20b", "", {"quant_method": "mxfp4"}),
    "DeepSeek-V4-Flash-FP8": (V32, "DeepseekV4ForCausalLM", FP8),
    "DeepSeek-V4-Pro-FP8": (V32, "DeepseekV4ForCausalLM", FP8),
    "Step-3.7-Flash-FP8": (QWEN3, "Step3p7FlashForCausalLM", FP8),
    "Step-3.7-Flash": (QWEN3, "Step3p7FlashForCausalLM", None),
    "GLM-5-FP8": (GLM5, "", FP8),
    "GLM-5.1-FP8": (GLM5, "", FP8),
    "GLM-5.1": (GLM5, "", None),
    "GLM-5.2-FP8": (GLM5, "", FP8),
    "GLM-5.2": (GLM5, "", None),
    "GLM-5": (GLM5, "", None),
}  # fmt: skip
"""The resembling model; the architecture where it is another one, with `+` where its text is a part of config.json; and
`quantization_config`."""
_MODEL_TYPES = {
    "MiniMaxM3ForCausalLM": "minimax_m3",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Llama4ForConditionalGeneration": "llama4",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "NemotronHForCausalLM": "nemotron_h",
    "Step3p7FlashForCausalLM": "step3p7",
}
NEMOTRON_3_NANO: Mapping[str, Any] = {
    "hidden_size": 2688, "num_hidden_layers": 52, "vocab_size": 131072, "intermediate_size": 1856,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 3712, "norm_topk_prob": True,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
    "use_conv_bias": True, "chunk_size": 128,
}  # fmt: skip
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "Nemotron-3-Nano-30B-A3B-BF16": NEMOTRON_3_NANO,
    "Nemotron-3-Ultra-550B-A55B-BF16": NEMOTRON_3_NANO,
    "Qwen3-Coder-480B-A35B-Instruct": {
        "hidden_size": 6144, "num_hidden_layers": 62, "num_attention_heads": 96, "num_key_value_heads": 8,
        "num_experts": 160, "moe_intermediate_size": 2560,
    },
    "Mixtral-8x22B-v0.1": {
        "hidden_size": 6144, "num_hidden_layers": 56, "num_attention_heads": 48, "intermediate_size": 16384,
        "vocab_size": 32768,
    },
}  # fmt: skip
NAMES = tuple(_RELEASES)
_STAND_INS = {f"{entry}, {_SIZES.get(name)}": name for name, entry in _RELEASES.items()}
DISTINCT = tuple(_STAND_INS.values())
"""One name of each stand-in: releases that differ in nothing that a refusal reads have the same."""


def release_config(name: str) -> dict[str, Any]:
    """config.json of a release, as far as a refusal reads it."""
    resembling, architecture, quantization = _RELEASES[name]
    plain = {key: value for key, value in published_config(resembling).items() if key != "quantization_config"}
    hf = {**plain, **_SIZES.get(name, {})}
    outer = {"quantization_config": dict(quantization)} if quantization else {}
    own = architecture.removeprefix("+")
    if not architecture:
        return {**hf, **outer}
    known = {"architectures": [own], "model_type": _MODEL_TYPES[own]}
    return {**known, **outer, "text_config": hf} if architecture.startswith("+") else {**hf, **known, **outer}
