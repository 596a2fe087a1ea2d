"""SGLang's names: the tensors that its ranks hold, in terms of the Hugging Face tensors of a push.

It keeps q, k and v as one tensor, gate and up as one, and all experts of a layer as two (`w13_weight` `[E, 2I, H]`,
`w2_weight` `[E, H, I]`). Every fused tensor is the concatenation of its parts along the leading axis, and what a rank
holds of it is that of its slices of the parts.

Shape letters: E experts, I expert width, H hidden width, V vocabulary.
Source: SGLang 0.5.23, `srt/layers/linear.py`, `vocab_parallel_embedding.py`, `moe/fused_moe_triton/layer.py`, and
`load_weights` of `srt/models`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from moe_trm.rollout.sglang.slices import ALONE, Group, Ranks, Slicing
from moe_trm.sync.rounding import DTYPES, Rounding

VOCAB_MULTIPLE = 64
"""The engine pads the rows of embedding and output head to a multiple of this with zeros."""

_ATTENTION = re.compile(r"(.*\.self_attn)\.([qkv])_proj\.(weight|bias)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_GATE_AND_UP, _UP = ("gate_proj", "up_proj", "w1", "w3"), ("up_proj", "w3")
"""An expert's first two matrices, as most families call them and as Mixtral does."""
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")
"""gpt-oss: the matrices of all experts of a layer as one tensor, and their biases.

The engine transposes the matrices, but for the kernels of the package `triton_kernels`.
"""
_SHARED = re.compile(r"(.*\.mlp)\.shared_experts\.(gate|up|down)_proj\.weight")
"""The expert that every token passes. Some servers hold it behind the other experts of its layer, as one of them."""
_LATENT = re.compile(r"(.*\.self_attn)\.(q_a_proj|kv_a_proj_with_mqa)\.weight")
"""Latent attention: one tensor where the queries are compressed, too (`q_lora_rank`).

Else they are `q_proj`, and each is a tensor of its own.
"""
_DENSE = re.compile(r"(.*)\.(gate|up)_proj\.(weight|bias)")
_SHARED_GATE = ".mlp.shared_expert_gate.weight"
"""A tensor that models with the gated delta rule have in every layer, and no other family."""
_DELTA = re.compile(r"(.*\.linear_attn)\.in_proj_(qkv|z|b|a)\.weight")
"""Qwen3.5: projections into the gated delta rule that Qwen3-Next has in two tensors, as the engine holds them."""
_HELD = {"w13_weight_bias": "float32", "w2_weight_bias": "float32", "A_log": "float32"}
"""The engine's dtype of tensors that do not follow `--dtype`, by the end of their names: gpt-oss's, and decays."""
_OFFSET = re.compile(r"(.*(layernorm|[qk]_norm|model\.norm))\.weight")
"""Norms of models with the gated delta rule, whose weights are offsets from 1: the engine holds the sum, too."""
_FLOAT32_GATES = ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""Architectures whose routers SGLang holds in float32, whatever `--dtype` is."""
_GATE = re.compile(r"(.*\.block_sparse_moe)\.gate\.weight")
"""Of Mixtral, and of MiniMax-M2, which has a selection bias beside it and is held in float32."""
_MINIMAX = "MiniMaxM2ForCausalLM"

_ROWS, _COLUMNS = 0, 1
_CUTS: Sequence[tuple[str, int, Group]] = (
    (r".*embed_tokens\.weight", _ROWS, "embedding"),
    (r"lm_head\.weight", _ROWS, "head"),
    (r".*\.self_attn\.(q_proj|k_proj|v_proj|q_b_proj|kv_b_proj)\.(weight|bias)", _ROWS, "attention"),
    (r".*\.self_attn\.sinks", _ROWS, "attention"),
    (r".*\.linear_attn\.((in_proj_\w+|conv1d)\.weight|A_log|dt_bias)", _ROWS, "attention"),
    (r".*\.(self_attn\.o_proj|linear_attn\.out_proj)\.weight", _COLUMNS, "attention"),
    (r".*\.shared_experts?\.(gate|up)_proj\.weight", _ROWS, "shared"),
    (r".*\.shared_experts?\.down_proj\.weight", _COLUMNS, "shared"),
    (r".*\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight", _ROWS, "experts"),
    (r".*\.experts\.\d+\.(down_proj|w2)\.weight", _COLUMNS, "experts"),
    (r".*\.experts\.gate_up_proj", 2, "experts"),
    (r".*\.experts\.(gate_up_proj_bias|down_proj)", 1, "experts"),
    (r".*\.mlp\.(gate|up)_proj\.(weight|bias)", _ROWS, "dense"),
    (r".*\.mlp\.down_proj\.weight", _COLUMNS, "dense"),
)
"""Pushed tensors that ranks share: by name, the dimension that is cut and the ranks that share it. Others are whole."""
_NORMS_OF_ALL_HEADS: Sequence[tuple[str, int, Group]] = ((r".*\.self_attn\.[qk]_norm\.weight", _ROWS, "attention"),)
"""MiniMax-M2: one norm over all heads, of which a rank has its own."""
_KV_HEADS = re.compile(r".*\.self_attn\.k_(proj|norm)\..*|.*\.self_attn\.v_proj\..*")
_QKV_OF_DELTA = re.compile(r".*\.linear_attn\.(in_proj_qkv|conv1d)\.weight")
_ADDED_ONCE = re.compile(r".*\.experts\.down_proj_bias")
"""The ranks add up their outputs, and so only the first has the bias."""


@dataclass(frozen=True)
class EngineShape:
    """The settings that decide how a server holds its tensors.

    Attributes:
        dtype: its arithmetic.
        device: on which it hashes.
        architecture: as in the config.json of what it serves.
        kv_heads: key and value heads; 0: never more ranks than heads.
        delta_rows: rows of q, k and v in the projection into the gated delta rule.
        num_experts: routed experts of a layer.
        shared_among_experts: it holds the shared expert behind the routed ones.
        transposes: it transposes matrices that are pushed for all experts at once.
        sinks: dtype of attention sinks.
    """

    dtype: str
    device: str = "cpu"
    architecture: str = ""
    ranks: Ranks = ALONE
    kv_heads: int = 0
    delta_rows: tuple[int, ...] = ()
    num_experts: int = 0
    shared_among_experts: bool = False
    transposes: bool = True
    sinks: str = "bfloat16"

    def cut(self, name: str) -> Slicing:
        """The slices of the pushed tensor `name` on its ranks."""
        cuts = (*_NORMS_OF_ALL_HEADS, *_CUTS) if self.architecture == _MINIMAX else _CUTS
        if _ADDED_ONCE.fullmatch(name):
            return Slicing(None, "experts", once=True)
        found = next(((dim, group) for pattern, dim, group in cuts if re.fullmatch(pattern, name)), None)
        if found is None:
            return Slicing()
        dim, group = found
        if self.shared_among_experts and _SHARED.fullmatch(name):
            group = "experts"
        return Slicing(
            dim,
            group,
            heads=self.kv_heads if _KV_HEADS.fullmatch(name) else 0,
            sections=self.delta_rows if _QKV_OF_DELTA.fullmatch(name) else (),
            multiple=VOCAB_MULTIPLE if group in ("embedding", "head") else 1,
        )

    def turned(self, name: str) -> bool:
        """True where it transposes the last two dimensions of the pushed tensor `name`."""
        stacked = _STACKED.fullmatch(name)
        return self.transposes and stacked is not None and not stacked[3]


def engine_place(
    name: str, pushed: Container[str] = (), *, shared_among_experts: bool = False
) -> tuple[str, tuple[int, int]]:
    """Engine tensor of a Hugging Face tensor in the push `pushed`, and the sort key of the part within it.

    >>> engine_place("model.layers.0.mlp.experts.3.up_proj.weight")
    ('model.layers.0.mlp.experts.w13_weight', (3, 1))
    """
    if (layer := name.partition(".self_attn.")[0]) != name and f"{layer}{_SHARED_GATE}" in pushed:
        # Models with the gated delta rule have no module between a layer and its attention.
        place, part = engine_place(name)
        return place.replace(".self_attn", ""), part
    if match := _DELTA.fullmatch(name):
        return f"{match[1]}.in_proj_{'qkvz' if match[2] in ('qkv', 'z') else 'ba'}.weight", (0, int(match[2] in "za"))
    if (match := _ATTENTION.fullmatch(name)) and f"{match[1]}.kv_a_proj_with_mqa.weight" not in pushed:
        return f"{match[1]}.qkv_proj.{match[3]}", (0, "qkv".index(match[2]))
    if match := _EXPERT.fullmatch(name):
        fused = "w13_weight" if match[3] in _GATE_AND_UP else "w2_weight"
        return f"{match[1]}.{fused}", (int(match[2]), int(match[3] in _UP))
    if shared_among_experts and (match := _SHARED.fullmatch(name)):
        fused = "w2_weight" if match[2] == "down" else "w13_weight"
        return f"{match[1]}.experts.{fused}", (_BEHIND, int(match[2] == "up"))
    if match := _STACKED.fullmatch(name):
        fused = "w13_weight" if match[2] == "gate_up_proj" else "w2_weight"
        return f"{match[1]}.{fused}{match[3] or ''}", (0, 0)
    if (match := _LATENT.fullmatch(name)) and f"{match[1]}.q_a_proj.weight" in pushed:
        return f"{match[1]}.fused_qkv_a_proj_with_mqa.weight", (0, int(match[2] != "q_a_proj"))
    if match := _DENSE.fullmatch(name):
        return f"{match[1]}.gate_up_proj.{match[3]}", (0, int(match[2] == "up"))
    return name, (0, 0)


_BEHIND = 1 << 30
"""Sort key of a part that comes after every routed expert."""

Recipe = tuple[int | None, ...]
"""The piece of each part that makes up an engine tensor; None: it has none of this part."""


class Layout(NamedTuple):
    """The engine's tensors by the names of a push, which are the same from push to push."""

    tensor_of: Mapping[str, str]
    """Engine tensor of each Hugging Face tensor."""
    parts: Mapping[str, Sequence[str]]
    """The parts of each engine tensor, in order."""
    recipes: Mapping[str, Sequence[Recipe]]
    """The different contents of each engine tensor."""
    held_by: Mapping[str, Sequence[int]]
    """The number of its content on each rank."""
    cuts: Mapping[str, Slicing]
    """How ranks share each Hugging Face tensor."""
    dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]]
    """Of each engine tensor two dtypes: that of the push, and the one in which the engine stores it."""
    as_is: Mapping[str, torch.dtype | None]
    """The dtype in which the engine hashes the bytes of the parts as they are pushed; None: in no dtype."""
    sums: Mapping[str, str]
    """The engine's tensor of 1 + weight, by the weight's."""


@lru_cache(maxsize=4)
def layout_of(names: frozenset[str], shape: EngineShape) -> Layout:
    """Layout of a push of `names` on a server."""
    places = {name: engine_place(name, names, shared_among_experts=shape.shared_among_experts) for name in names}
    parts: dict[str, list[str]] = {}
    for name in sorted(names, key=places.__getitem__):
        parts.setdefault(places[name][0], []).append(name)
    cuts = {name: shape.cut(name) for name in names}
    recipes: dict[str, Sequence[Recipe]] = {}
    held_by: dict[str, Sequence[int]] = {}
    for fused, own in parts.items():
        by_rank = [tuple(_piece(name, cuts[name], rank, shape) for name in own) for rank in range(shape.ranks.total)]
        recipes[fused] = tuple(dict.fromkeys(by_rank))
        numbers = {recipe: number for number, recipe in enumerate(recipes[fused])}
        held_by[fused] = tuple(numbers[recipe] for recipe in by_rank)
    dtypes = {fused: _dtypes(fused, shape, names) for fused in parts}
    sums = {}
    if any(name.endswith(_SHARED_GATE) for name in names):
        sums = {fused: f"{match[1]}.gemma_weight" for fused in parts if (match := _OFFSET.fullmatch(fused))}
    as_is: dict[str, torch.dtype | None] = {}
    for fused, own in parts.items():
        dtype, held = dtypes[fused]
        changed = any(cuts[name].multiple > 1 or shape.turned(name) for name in own)
        plain = len(recipes[fused]) == 1 and not changed and dtype == held and fused not in sums
        as_is[fused] = dtype if plain else None
    tensor_of = {name: fused for name, (fused, _) in places.items()}
    return Layout(tensor_of, parts, recipes, held_by, cuts, dtypes, as_is, sums)


def _piece(name: str, cut: Slicing, rank: int, shape: EngineShape) -> int | None:
    """The number of the piece that the rank holds; None where another rank has this expert."""
    expert = _EXPERT.fullmatch(name)
    if expert and shape.ranks.expert_groups > 1 and not shape.ranks.holds(rank, int(expert[2]), shape.num_experts):
        return None
    return cut.piece_of(rank, shape.ranks)


def _dtypes(fused: str, shape: EngineShape, pushed: Container[str]) -> tuple[torch.dtype, torch.dtype]:
    dtype = DTYPES[Rounding(shape.dtype).dtype_of(fused)]
    end = fused.rpartition(".")[2]
    if shape.architecture in _FLOAT32_GATES and fused.endswith(".mlp.gate.weight"):
        return dtype, torch.float32
    if (gate := _GATE.fullmatch(fused)) and f"{gate[1]}.e_score_correction_bias" in pushed:
        return dtype, torch.float32
    held = shape.sinks if end == "sinks" else _HELD.get(end, "")
    return dtype, DTYPES.get(held, dtype)
