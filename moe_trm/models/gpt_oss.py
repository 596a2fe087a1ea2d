"""gpt-oss: biases everywhere, attention sinks and windows, a clamped activation, experts fused on disk. Megatron-Core: not converted."""

from moe_trm.models.family import Family

GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    lambda _hf: {},
    not_converted="attention sinks, windows and biases of the experts have no conversion",
    tiny={
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)
