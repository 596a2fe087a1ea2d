"""Adapters of a model (`learner.lora`): parameters of their factors, and the parameters that they are merged into.

Letters: R rank, I inputs and O outputs of a matrix. A is `[R, I]`, B `[O, R]`. Where ranks share the rows of a
matrix they share B, where they share its columns A. Each has the other factor whole
(`moe_trm/learner/megatron/lora.py`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from moe_trm.config.schema import LoraConfig
from moe_trm.learner.lora.targets import adapted_by_config
from moe_trm.models.family import Family, HfConfig
from moe_trm.models.registry import family_of
from moe_trm.tools.plan.parameters import NO_ADAPTERS, Adapted, Merged, Model, Part, elements_of, part_of

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Matrices that a learner holds as one parameter, which is merged as a whole."""
_MODULE = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_NARROWED = frozenset(("o_proj", "down_proj", "w2"))
"""Matrices whose columns ranks share: their outputs are as wide as the model."""


def with_adapters(model: Model, hf: HfConfig, lora: LoraConfig, where: str = "config.json") -> Model:
    """`model` with the adapters of this configuration.

    Raises:
        ConfigError: a target that no matrix has.
    """
    if not lora.rank:
        return model
    family = family_of(hf, where)
    names: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for module in adapted_by_config(hf, lora):
        if match := _MODULE.fullmatch(module):
            names[int(match[1])][_EXPERT.sub(".experts.0.", match[2])] += 1
    by_names: dict[tuple[tuple[str, int], ...], Adapted] = {(): NO_ADAPTERS}

    def layer(number: int) -> Adapted:
        layer_names = tuple(sorted(names[number].items()))
        if layer_names not in by_names:
            by_names[layer_names] = _adapted(dict(layer_names), family, hf, lora.rank)
        return by_names[layer_names]

    return replace(model, adapters=tuple(layer(number) for number in range(len(model.layers))))


def _adapted(modules: Mapping[str, int], family: Family, hf: HfConfig, rank: int) -> Adapted:
    """`modules`: of one layer, and how many experts have each."""
    factors = [part for name, number in modules.items() for part in _factors(name, number, family, hf, rank)]
    merged: dict[tuple[str, ...], Merged] = {}
    for name, number in modules.items():
        packed = _packed(name, family, hf)
        elements = sum(elements_of(f"{module}.weight", family, hf) for module in packed)
        share = part_of(f"{name}.weight", elements)
        if _EXPERT.search(name):
            share = replace(share, share="expert", elements=number * elements)
        most = max(number, merged[packed].number) if packed in merged else number
        merged[packed] = Merged(replace(share, elements=most * elements), most)
    return Adapted(tuple(factors), tuple(merged.values()))


def _packed(name: str, family: Family, hf: HfConfig) -> tuple[str, ...]:
    """Modules of the matrices that share a parameter with `name`'s."""
    owner = name.rpartition(".")[2]
    latent = "kv_lora_rank" in hf and ".self_attn." in f".{name}"
    for group in TOGETHER:
        if owner in group and not latent:
            return tuple(name.removesuffix(owner) + member for member in group)
    return (name,)


def _factors(name: str, number: int, family: Family, hf: HfConfig, rank: int) -> Iterator[Part]:
    owner, elements = name.rpartition(".")[2], elements_of(f"{name}.weight", family, hf)
    hidden = int(hf["hidden_size"])
    inputs = {"q_b_proj": "q_lora_rank", "kv_b_proj": "kv_lora_rank"}.get(owner)
    width = elements // hidden if owner in _NARROWED else int(hf[inputs]) if inputs else hidden
    a, b = rank * width, rank * (elements // width)
    matrix = part_of(f"{name}.weight", elements)
    if _EXPERT.search(name):
        yield Part(matrix.kind, "expert", number * (a + b), a + b)
    elif matrix.share == "whole":
        yield Part(matrix.kind, "whole", a + b, a + b)
    else:
        cut, uncut = (a, b) if owner in _NARROWED else (b, a)
        yield Part(matrix.kind, matrix.share, cut, cut)
        yield Part(matrix.kind, "whole", uncut, uncut)
