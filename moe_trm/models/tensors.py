"""Every parameter of a model, and the tensors of its Hugging Face checkpoint, as config.json announces them.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from moe_trm.models.family import Family, HfConfig, Link
from moe_trm.models.hf_config import num_experts

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
TOP = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": OUTPUT,
}
"""Parameters outside the layers: Megatron's name, Hugging Face's name."""


def parameters(family: Family, hf: HfConfig) -> Iterator[tuple[str, Link]]:
    """Megatron's name of every parameter of the whole model, and its tensors in the checkpoint.

    Layers and experts are counted over all ranks.
    """
    tied = bool(hf.get("tie_word_embeddings"))
    yield from ((name, Link((hf_name,))) for name, hf_name in TOP.items() if not (tied and hf_name == OUTPUT))
    for number in range(int(hf["num_hidden_layers"])):
        layer = family.layer(hf, number)
        experts = {
            f"mlp.experts.local_experts.{expert}.{name}": link
            for expert in range(num_experts(hf))
            for name, link in layer.expert(expert).items()
        }
        for name, link in {**layer.tensors, **experts}.items():
            hf_names = tuple(f"model.layers.{number}.{hf_name}" for hf_name in link.hf_names)
            yield f"decoder.layers.{number}.{name}", replace(link, hf_names=hf_names)


def tensor_names(family: Family, hf: HfConfig) -> frozenset[str]:
    """Every tensor of the checkpoint; the output weight only where it is not tied to the embedding."""
    return frozenset(hf_name for _, link in parameters(family, hf) for hf_name in link.hf_names)


def is_prediction(hf_name: str, hf: HfConfig) -> bool:
    """True for a tensor of the layers that predict several tokens at once (MTP).

    They lie behind the last layer (DeepSeek-V3, GLM-4.5) or apart from the layers (`mtp.`).
    """
    layer = re.match(r"model\.layers\.(\d+)\.", hf_name)
    behind = layer is not None and "num_hidden_layers" in hf and int(layer[1]) >= int(hf["num_hidden_layers"])
    return behind or hf_name.startswith(("mtp.", "model.mtp."))
