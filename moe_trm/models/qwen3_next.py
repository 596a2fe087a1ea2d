"""Qwen3-Next: three layers with the gated delta rule to one with full, gated attention; softmax router.

A shared expert behind a gate, norms whose weights are offsets from 1, rotation of a quarter of each head.
"""

from moe_trm.models.family import Attention, Family, HfConfig
from moe_trm.models.hybrid import HYBRID_REQUIRED, ONLY_TRANSFORMERS, TINY, gated_shared_expert, hybrid_attention


def _attention(hf: HfConfig, layer: int) -> Attention:
    return hybrid_attention(hf, layer, ("in_proj_qkvz", "in_proj_ba"))


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _attention,
    router=gated_shared_expert,
    required=HYBRID_REQUIRED,
    not_in_megatron=ONLY_TRANSFORMERS,
    tiny={**TINY, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
