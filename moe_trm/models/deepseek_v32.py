"""DeepSeek-V3.2: DeepSeek-V3 whose attention sees `index_topk` tokens, which an indexer chooses in each layer.

The indexer scores every earlier token with a few small heads and keeps the best. Nothing in the loss depends on its
weights, so they are not trained.
"""

from dataclasses import replace

from moe_trm.models.deepseek_v3 import DEEPSEEK_V3, latent_attention
from moe_trm.models.family import Attention, HfConfig, Link, Required

ONLY_TRANSFORMERS = "sparse attention, whose choice of tokens is replayed in transformers' model only"
INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")


def sparse_attention(hf: HfConfig, layer: int) -> Attention:
    """Latent attention with the indexer of its layer; layers that take the choice of an earlier one have none."""
    kinds = indexer_types(hf)
    names = [f"self_attn.indexer.{name}" for name in INDEXER] if kinds[layer] == "full" else []
    links = {name.replace("self_attn", "self_attention"): Link((name,)) for name in names}
    return Attention("sparse", {**latent_attention(hf, layer).tensors, **links})


def indexer_types(hf: HfConfig) -> list[str]:
    """By layer: `full` has an indexer, `shared` takes the choice of the last full layer before it."""
    if hf.get("indexer_types"):
        return list(hf["indexer_types"])
    layers = range(int(hf["num_hidden_layers"]))
    if pattern := hf.get("index_topk_pattern"):
        return ["full" if kind in ("F", "full") else "shared" for kind in pattern]
    frequency, offset = max(int(hf.get("index_topk_freq") or 1), 1), int(hf.get("index_skip_topk_offset", 2))
    return ["shared" if max(layer - offset + 1, 0) % frequency else "full" for layer in layers]


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    attention=sparse_attention,
    required={**DEEPSEEK_V3.required, "indexer_rope_interleave": Required(False, "another rotation in the indexer")},
    not_in_megatron=ONLY_TRANSFORMERS,
    tiny={**DEEPSEEK_V3.tiny, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 4},
)
