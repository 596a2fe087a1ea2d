"""Matrices that adapters change, chosen by their Hugging Face names. Imports no torch.

Names are those of the checkpoint, so that both learners adapt the same matrices: `model.layers.0.self_attn.q_proj` is
one, also where Megatron-Core holds queries, keys and values together, and `model.layers.0.mlp.experts.3.up_proj` also
where transformers holds all experts of a layer in one tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from moe_trm.config.schema import LearnerConfig, LoraConfig
from moe_trm.errors import ConfigError
from moe_trm.models.hf_config import num_experts
from moe_trm.models.registry import family_of, find_family
from moe_trm.models.tensors import tensor_names

KINDS: Mapping[str, re.Pattern[str]] = {
    "attention": re.compile(r"\.self_attn\.\w+_proj(_with_mqa)?$|\.linear_attn\.(in|out)_proj\w*$"),
    "experts": re.compile(r"\.experts\.\d+\.\w+$|\.shared_experts?\.\w+$"),
    "router": re.compile(r"\.(mlp|block_sparse_moe)\.(gate|router)$"),
}
"""Groups of modules by the names of `learner.lora.targets`."""
ROUTED = re.compile(r"\.experts\.\d+\.\w+$")
_WEIGHT = ".weight"
_MATRIX = re.compile(r"model\.layers\.(\d+)\.(?!.*(norm|conv1d)\.weight$|.*\.indexer\.).+\.weight$")


def check_lora(learner: LearnerConfig, hf: Mapping[str, Any]) -> None:
    """Refuse adapters that this model or layout cannot have, before anything is loaded.

    Raises `ConfigError` for a target that no matrix of the model has, and for experts whose matrices are shared between
    ranks.
    """
    family, lora = find_family(hf), learner.lora
    if not lora.rank or family is None:
        return
    modules = adapted_by_config(hf, lora)
    shared = learner.parallel.expert_tensor
    if shared > 1 and any(map(ROUTED.search, modules)):
        raise ConfigError(
            "ranks that share an expert's matrices would each keep a copy of one factor, whose gradients Megatron-Core "
            "does not add up",
            where="learner.parallel.expert_tensor",
            got=f"{shared} with adapters of experts (learner.lora.targets)",
            expected=1,
            fix="Use learner.parallel.expert, or take the experts out of learner.lora.targets.",
        )


def adapted_by_config(hf: Mapping[str, Any], lora: LoraConfig) -> frozenset[str]:
    """As `adapted_modules`, of a model whose tensors follow from config.json. Raises as it does."""
    return _adapted_by_config(json.dumps(hf, sort_keys=True), lora)


@lru_cache(maxsize=4)
def _adapted_by_config(text: str, lora: LoraConfig) -> frozenset[str]:
    hf = json.loads(text)
    return adapted_modules(tensor_names(family_of(hf, "config.json"), hf), lora, hf)


def modules_of(hf: Mapping[str, Any], checkpoint_names: Collection[str]) -> frozenset[str]:
    """Names of a model's tensors; the checkpoint's where its family is not known here."""
    family = find_family(hf)
    return frozenset(checkpoint_names) if family is None else tensor_names(family, hf)


def adapted_modules(tensors: Collection[str], lora: LoraConfig, hf: Mapping[str, Any]) -> frozenset[str]:
    """Modules whose matrix gets an adapter, e.g. `model.layers.0.self_attn.q_proj`, among the model's tensors.

    Raises `ConfigError` for a target that no matrix of a decoder layer has.
    """
    modules = matrix_modules(tensors, hf)
    adapted: set[str] = set()
    for target in lora.targets:
        matching = {module for module in modules if _matches(module, target)}
        if not matching:
            raise ConfigError(
                "no matrix of the model has this name",
                where="learner.lora.targets",
                got=target,
                expected=f"{', '.join(KINDS)}, or a module such as {min(modules, default='none')}",
                fix=_reason(tensors, target, hf),
            )
        adapted |= matching
    return frozenset(adapted)


def matrix_modules(tensors: Collection[str], hf: Mapping[str, Any]) -> frozenset[str]:
    """Modules of decoder layers with a matrix; layers for predicting several tokens at once are not among them."""
    layers = int(hf["num_hidden_layers"])
    return frozenset(
        name.removesuffix(_WEIGHT)
        for name in tensors
        if (matrix := _MATRIX.match(name)) is not None and int(matrix[1]) < layers
    )


def _matches(module: str, target: str) -> bool:
    if target in KINDS:
        return KINDS[target].search(module) is not None
    return module == target or module.endswith(f".{target}")


def _reason(tensors: Collection[str], target: str, hf: Mapping[str, Any]) -> str:
    stacked = any(name.endswith(".experts.gate_up_proj") for name in tensors)
    if target == "experts" and stacked:
        return "Adapt attention and router: this model's checkpoint has the experts of a layer in one tensor."
    if target in ("experts", "router") and not num_experts(hf):
        return f"Take {target} out of learner.lora.targets: the model is dense."
    return "Embeddings, the output layer, norms and biases have no adapters."
