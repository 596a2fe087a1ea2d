"""Parameters of a model by kind, total and per token, from config.json.

Letters: H hidden size, E experts of a layer, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from moe_trm.errors import CheckpointError
from moe_trm.models.family import Family, HfConfig, Layer, Link
from moe_trm.models.hf_config import PREDICTION_LAYERS, expert_width, head_dim, num_experts, shared_width
from moe_trm.models.nemotron_h import mamba_elements
from moe_trm.models.registry import sized_family_of

Kind = Literal["embedding", "output", "attention", "norms", "dense", "router", "experts", "shared experts"]
KINDS: tuple[Kind, ...] = (
    "embedding",
    "output",
    "attention",
    "norms",
    "dense",
    "router",
    "experts",
    "shared experts",
)
Share = Literal["whole", "tensor", "expert"]
"""Ranks that divide a tensor: none, `learner.parallel.tensor`, or the experts'."""


@dataclass(frozen=True)
class Part:
    """Tensors of one kind that the same ranks share. `active`: the elements that one token meets."""

    kind: Kind
    share: Share
    elements: int
    active: int

    def held(self, tensor: int, experts: int) -> int:
        """Elements on one rank, where so many ranks share a tensor and so many the experts."""
        return self.elements // {"whole": 1, "tensor": tensor, "expert": experts}[self.share]


def held(parts: Iterable[Part], tensor: int, experts: int) -> tuple[int, int]:
    """Elements of `parts` on one rank: outside the experts, and of experts."""
    dense = mixed = 0
    for part in parts:
        if part.share == "expert":
            mixed += part.held(tensor, experts)
        else:
            dense += part.held(tensor, experts)
    return dense, mixed


@dataclass(frozen=True)
class Merged:
    """A parameter that passes compute merged with its adapters; `number` of them, one for each expert, in `part`."""

    part: Part
    number: int


@dataclass(frozen=True)
class Adapted:
    """Adapters of one decoder layer.

    Attributes:
        factors: A and B, by the ranks that share them.
        merged: the parameters that they change, each with all of its matrices.
    """

    factors: tuple[Part, ...] = ()
    merged: tuple[Merged, ...] = ()

    @property
    def kinds(self) -> frozenset[Kind]:
        """Kinds of matrices with adapters."""
        return frozenset(merged.part.kind for merged in self.merged)


NO_ADAPTERS = Adapted()


@dataclass(frozen=True)
class Model:
    """The parts of every decoder layer and of both ends, and of all layers for predicting several tokens (MTP).

    MTP layers are apart: no learner here trains them. Only tensors that they do not share with the model are
    counted. `caching`: number of layers that keep keys and values, or latents, of every token. `adapters`: of every
    decoder layer; empty where the weights themselves train. `vision`: parameters of a vision tower beside the text,
    which are in no other count.
    """

    layers: tuple[tuple[Part, ...], ...]
    embedding: Part
    output: Part
    final_norm: Part
    tied: bool
    prediction: tuple[Part, ...]
    caching: int
    adapters: tuple[Adapted, ...] = ()
    vision: int = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of them but the MTP layers; the output layer only where it is not the embedding."""
        ends = (self.embedding, self.final_norm, *(() if self.tied else (self.output,)))
        return (*ends, *(part for layer in self.layers for part in layer))

    def total(self, without: Iterable[Kind] = ()) -> int:
        """Parameters, MTP layers left out."""
        return sum(total for kind, (total, _) in self.by_kind.items() if kind not in without)

    def active(self, without: Iterable[Kind] = ()) -> int:
        """Parameters that one token meets. The embedding counts whole, as most publishers count."""
        return sum(active for kind, (_, active) in self.by_kind.items() if kind not in without)

    @cached_property
    def held_by_layer(self) -> Callable[[int, int], tuple[tuple[int, int], ...]]:
        """`held` of every decoder layer, for ranks that share a tensor and ranks that share the experts."""
        return cache(lambda tensor, experts: tuple(held(layer, tensor, experts) for layer in self.layers))

    def adapter(self, layer: int) -> Adapted:
        """Adapters of a decoder layer."""
        return self.adapters[layer] if self.adapters else NO_ADAPTERS

    @property
    def adapter_total(self) -> int:
        """Parameters of all adapters."""
        return sum(part.elements for layer in self.adapters for part in layer.factors)

    @property
    def prediction_total(self) -> int:
        """Parameters of the MTP layers."""
        return sum(part.elements for part in self.prediction)

    @cached_property
    def by_kind(self) -> dict[Kind, tuple[int, int]]:
        """Total and active parameters of each kind that the model has."""
        parts_by_kind = {kind: [part for part in self.parts if part.kind == kind] for kind in KINDS}
        return {
            kind: (sum(part.elements for part in parts), sum(part.active for part in parts))
            for kind, parts in parts_by_kind.items()
            if parts
        }


def model_of(hf: HfConfig, where: str = "config.json") -> Model:
    """The model that a config.json describes.

    Args:
        hf: config.json.
        where: the file, for messages.

    Raises:
        CheckpointError: an architecture without a family, or a size that config.json does not have.
    """
    fix = "Use a checkpoint of one of these families: the planner counts by them, for either learner."
    family = sized_family_of(hf, where, fix)
    try:
        hidden = int(hf["hidden_size"])
        vocabulary = int(hf["vocab_size"]) * hidden
        numbers = range(int(hf["num_hidden_layers"]))
        layers = tuple(layer_parts(family.layer(hf, number), family, hf) for number in numbers)
    except KeyError as error:
        raise CheckpointError(
            "config.json lacks a size",
            where=where,
            got="no such key",
            expected=str(error.args[0]),
            fix="Use the config.json of the published checkpoint.",
        ) from error
    # Each is a decoder layer like the last one, with the norms and the matrix that join it to the model.
    prediction = sum(int(hf.get(key) or 0) for key in PREDICTION_LAYERS)
    joint = Part("dense", "whole", 2 * hidden * hidden, 2 * hidden * hidden)
    norms = Part("norms", "whole", 3 * hidden, 3 * hidden)
    return Model(
        layers,
        embedding=Part("embedding", "tensor", vocabulary, vocabulary),
        output=Part("output", "tensor", vocabulary, vocabulary),
        final_norm=Part("norms", "whole", hidden, hidden),
        tied=bool(hf.get("tie_word_embeddings")),
        prediction=(joint, norms, *layers[-1]) * prediction,
        caching=family.num_cached(hf),
    )


def vision_parameters(full_config: HfConfig, where: str = "config.json") -> int:
    """Parameters of the vision tower of a Qwen3-VL-MoE.

    Patches and positions, `depth` blocks, and the mergers into the text's width: one at the end, and one for each level
    of `deepstack_visual_indexes`. Source: `Qwen3VLMoeVisionModel` of transformers.

    Raises:
        CheckpointError: `vision_config` lacks a size.
    """
    vision = full_config.get("vision_config") or {}
    names = ("hidden_size", "intermediate_size", "depth", "patch_size", "temporal_patch_size", "spatial_merge_size",
             "out_hidden_size", "num_position_embeddings", "deepstack_visual_indexes")  # fmt: skip
    if missing := [name for name in names if vision.get(name) is None]:
        raise CheckpointError(
            "the vision tower lacks a size",
            where=f"{where}, vision_config",
            got="no such key",
            expected=", ".join(missing),
            fix="Use the config.json of the published checkpoint.",
        )
    hidden, inner, depth, patch, frames, merge, out, positions = (int(vision[name]) for name in names[:-1])
    levels, wide = len(vision["deepstack_visual_indexes"]), hidden * merge**2
    patches = (int(vision.get("in_channels", 3)) * frames * patch**2 + 1) * hidden
    block = (4 * hidden + 2 * inner) * hidden + 9 * hidden + inner
    merger = wide * wide + wide + (wide + 1) * out
    return patches + positions * hidden + depth * block + (1 + levels) * merger + 2 * hidden + levels * 2 * wide


def layer_parts(layer: Layer, family: Family, hf: HfConfig) -> tuple[Part, ...]:
    """The parts of one decoder layer. The tensors are those that the family names."""
    parts = tuple(part_of(name, elements_of(name, family, hf)) for name in _names(layer.tensors))
    if layer.feed_forward != "experts":
        return parts
    experts, top_k = num_experts(hf), int(hf["num_experts_per_tok"])
    expert_elements = sum(elements_of(name, family, hf) for name in _names(layer.expert(0)))
    return (*parts, Part("experts", "expert", experts * expert_elements, top_k * expert_elements))


def _names(links: Mapping[str, Link]) -> list[str]:
    return [name for link in links.values() for name in link.hf_names]


def part_of(name: str, elements: int) -> Part:
    owner, kind = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1], _kind(name)
    divided = kind in ("dense", "shared experts") or owner in _DIVIDED or name.startswith("mamba.")
    # Every rank adds the bias of a row-parallel matrix to the whole sum.
    whole_bias = owner == "o_proj" and name.endswith(".bias")
    return Part(kind, "tensor" if divided and not whole_bias else "whole", elements, elements)


_DIVIDED = frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "q_b_proj", "kv_b_proj", "sinks"))


def _kind(name: str) -> Kind:
    if "shared_expert" in name:
        return "shared experts"
    if name.endswith("e_score_correction_bias"):
        return "router"
    if "norm" in name:
        return "norms"
    if name.startswith(("self_attn.", "linear_attn.", "mamba.")):
        return "attention"
    if ".experts." in name:
        return "experts"
    return "router" if ".gate." in name or ".router." in name else "dense"


def elements_of(name: str, family: Family, hf: HfConfig) -> int:
    """Elements of a tensor of a layer; for a tensor that holds all experts, one expert's."""
    hidden, owner = int(hf["hidden_size"]), name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    kind = _kind(name)
    if name.startswith("linear_attn."):
        return _delta_elements(owner, hf)
    if name.startswith("mamba."):
        return mamba_elements(name.removeprefix("mamba."), hf)
    if kind == "attention" or (kind == "norms" and name.startswith("self_attn.")):
        return _attention_elements(owner, name.endswith(".bias"), family, hf)
    if kind == "norms":
        return hidden
    if kind == "router":
        return num_experts(hf) * (hidden if name.endswith(".weight") else 1)
    latent = int(hf.get("moe_latent_size") or hidden)
    if kind == "dense":
        return hidden * (latent if owner.endswith("latent_proj") else int(hf["intermediate_size"]))
    if kind == "shared experts":
        return hidden if owner == "shared_expert_gate" else hidden * shared_width(hf)
    matrices = 2 if owner.startswith("gate_up_proj") else 1
    if owner.endswith("_bias"):
        return hidden if owner.startswith("down") else matrices * expert_width(hf)
    return matrices * latent * expert_width(hf)


def _delta_elements(owner: str, hf: HfConfig) -> int:
    hidden, heads = int(hf["hidden_size"]), int(hf["linear_num_value_heads"])
    keys, values = (int(hf[f"linear_num_{x}_heads"]) * int(hf[f"linear_{x}_head_dim"]) for x in ("key", "value"))
    return {
        "in_proj_qkvz": hidden * 2 * (keys + values),
        "in_proj_qkv": hidden * (2 * keys + values),
        "in_proj_z": hidden * values,
        "in_proj_ba": hidden * 2 * heads,
        "in_proj_b": hidden * heads,
        "in_proj_a": hidden * heads,
        "conv1d": (2 * keys + values) * int(hf["linear_conv_kernel_dim"]),
        "norm": int(hf["linear_value_head_dim"]),
        "out_proj": values * hidden,
        "A_log": heads,
        "dt_bias": heads,
    }[owner]


def _attention_elements(owner: str, is_bias: bool, family: Family, hf: HfConfig) -> int:
    hidden, heads = int(hf["hidden_size"]), int(hf["num_attention_heads"])
    groups = int(hf.get("num_key_value_heads") or heads)
    if "kv_lora_rank" in hf:
        latent, query = int(hf["kv_lora_rank"]), int(hf.get("q_lora_rank") or 0)
        plain, rotated, value = (int(hf[f"{x}_head_dim"]) for x in ("qk_nope", "qk_rope", "v"))
        index_heads, index_width = (int(hf.get(f"index_{x}") or 0) for x in ("n_heads", "head_dim"))
        return {
            "wq_b": query * index_heads * index_width,
            "wk": hidden * index_width,
            "k_norm": index_width,
            "weights_proj": hidden * index_heads,
            "q_proj": hidden * heads * (plain + rotated),
            "q_a_proj": hidden * query,
            "q_a_layernorm": query,
            "q_b_proj": query * heads * (plain + rotated),
            "kv_a_proj_with_mqa": hidden * (latent + rotated),
            "kv_a_layernorm": latent,
            "kv_b_proj": latent * heads * (plain + value),
            "o_proj": heads * value * hidden,
        }[owner]
    size = head_dim(hf)
    gated = 2 if "gated delta" in family.attention_kinds(hf) else 1
    rows = {"q": gated * heads * size, "k": groups * size, "v": groups * size}
    if owner.endswith("_norm"):
        return rows[owner[0]] if family.whole_qk_norms else size
    if owner == "sinks":
        return heads
    if owner == "o_proj":
        return hidden if is_bias else heads * size * hidden
    return rows[owner[0]] * (1 if is_bias else hidden)
