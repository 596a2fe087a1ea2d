"""Qwen3.5-MoE as text: as Qwen3-Next, with four projections into the delta rule in place of two."""

from moe_trm.models.family import Attention, Family, HfConfig
from moe_trm.models.hybrid import HYBRID_REQUIRED, ONLY_TRANSFORMERS, TINY, gated_shared_expert, hybrid_attention


def _attention(hf: HfConfig, layer: int) -> Attention:
    return hybrid_attention(hf, layer, (f"in_proj_{suffix}" for suffix in ("qkv", "z", "b", "a")))


QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    "Qwen3_5MoeForCausalLM",
    _attention,
    router=gated_shared_expert,
    required=HYBRID_REQUIRED,
    not_in_megatron=ONLY_TRANSFORMERS,
    tiny=TINY,
)
