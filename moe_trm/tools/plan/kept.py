"""Bytes that a Megatron layer keeps for backward, on one rank, for each token of its columns.

A tensor counts once, when some operation saves it for its gradient. What an operation saves follows from its formula: a
product saves both factors, a sum neither. The rules are those of two sets of layers. `fused` are Transformer Engine's
on a GPU with flash attention. `plain` are those of a CPU (`moe_trm/learner/megatron/cpu_spec.py`), whose norms also
keep the normed values, and whose attention keeps keys and values repeated for every query head. For short
sequences in packs it keeps its weights instead, which are about as many.

Letters: d bytes of a number of `learner.dtype`, H hidden size, t tensor-parallel ranks, N query heads, G key/value
heads, D head dimension, K experts per token, F columns of an expert on a rank, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moe_trm.config.schema import LearnerConfig
from moe_trm.models.family import Layer
from moe_trm.models.hf_config import expert_width, head_dim, num_experts, rotary_share, shared_width
from moe_trm.models.registry import sized_family_of
from moe_trm.tools.plan.parameters import NO_ADAPTERS, Adapted

Kernels = Literal["fused", "plain", "plain packed"]
"""Layers of the learner: `plain packed` are those of a CPU that are given packs, whose attention runs by length."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Kept:
    """Bytes for each token that a rank has columns of.

    Attributes:
        entry: a layer's input.
        outside: everything but the inside of the feed-forward part, `entry` included.
        inside: of the feed-forward part.
        columns: of rotary angles, for each column of a row. Rows share them.
        gradients: in flight while a layer runs backward: three of its width, and its rows twice.
        scores: of attention, for each column of its row. Only Megatron's own layers on a GPU keep them.
    """

    entry: float
    outside: float
    inside: float
    columns: float
    gradients: float
    scores: float = 0.0

    @property
    def whole(self) -> float:
        """Kept bytes of the layer, without rotary angles."""
        return self.outside + self.inside


def layer_kept(
    hf: Mapping[str, Any],
    learner: LearnerConfig,
    kernels: Kernels,
    *,
    is_moe: bool,
    adapted: Adapted = NO_ADAPTERS,
    is_delta: bool = False,
) -> Kept:
    """Bytes that one decoder layer keeps.

    With adapters norms are frozen, and a product by a frozen matrix does not keep what it multiplies. They are
    merged into Megatron's own layers, whose attention keeps its scores on a GPU: the softmax in float32, what dropout
    kept, and the weights as they are multiplied.

    Args:
        hf: config.json of the model.
        learner: dtype and layout.
        kernels: the layers' kind.
        is_moe: the layer is a mixture of experts.
        adapted: its adapters.
        is_delta: it has the gated delta rule in place of attention.
    """
    size, t, hidden = BYTES[learner.dtype], learner.parallel.tensor, int(hf["hidden_size"])
    frozen = learner.lora.rank > 0
    # A router keeps its input, whether it trains or not.
    read = (not frozen or "attention" in adapted.kinds) + (not frozen or is_moe or "dense" in adapted.kinds)
    norms = (2 * norm_kept(hidden, size, kernels, frozen=frozen) + read * size * hidden) / t
    attention, columns = (_delta(hf, size), 0.0) if is_delta else _attention(hf, learner, kernels)
    own_layers = kernels == "fused" and keeps_scores(learner)
    scores = int(hf["num_attention_heads"]) / t * (5 + size) if own_layers else 0.0
    if not is_moe:
        width = int(hf["intermediate_size"]) / t
        copies = _COPIES - (frozen and "dense" not in adapted.kinds)
        inside, gradients = size * copies * width, size * (3 * hidden / t + 2 * width)
        return Kept(size * hidden / t, norms + attention, inside, columns, gradients, scores)
    rows = int(hf["num_experts_per_tok"]) * learner.parallel.expert_tensor / t
    inside = _experts(hf, learner, size, rows, adapted)
    gradients = size * hidden * (3 / t + 2 * rows)
    return Kept(size * hidden / t, norms + attention, inside, columns, gradients, scores)


def one_part_kept(hf: Mapping[str, Any], learner: LearnerConfig, layer: Layer) -> Kept:
    """Bytes that a layer of Nemotron-H keeps: of its norm, and of its one part. Not measured.

    Mamba-2 is counted as its kernels keep it (`mamba-ssm`), which compute the scan again. Without them, transformers'
    own scan keeps many times as much.
    """
    size, hidden = BYTES[learner.dtype], int(hf["hidden_size"])
    outside = norm_kept(hidden, size, "fused") + size * hidden
    if layer.attention == "mamba":
        return Kept(size * hidden, outside + _mamba(hf, size), 0.0, 0.0, 3 * size * hidden)
    if layer.attention == "full":
        return Kept(size * hidden, outside + _attention(hf, learner, "fused")[0], 0.0, 0.0, 3 * size * hidden)
    if layer.feed_forward == "dense":
        width = int(hf["intermediate_size"])
        return Kept(size * hidden, outside, size * _COPIES * width, 0.0, size * (3 * hidden + 2 * width))
    top_k, columns = int(hf["num_experts_per_tok"]), int(hf.get("moe_latent_size") or hidden)
    inside = _experts({**hf, "hidden_size": columns}, learner, size, top_k, NO_ADAPTERS)
    return Kept(size * hidden, outside, inside, 0.0, size * (3 * hidden + 2 * top_k * columns))


def _mamba(hf: Mapping[str, Any], size: int) -> float:
    """Mamba-2: the projection with the convolution's input, the scan's output, the gated norm, a state each chunk."""
    heads, state = int(hf["mamba_num_heads"]), int(hf["ssm_state_size"])
    inner, groups = heads * int(hf["mamba_head_dim"]), int(hf["n_groups"])
    projected = 2 * inner + 2 * groups * state + heads
    return size * (projected + 2 * inner) + 4 * groups + 4 * inner * state / int(hf["chunk_size"])


def keeps_scores(learner: LearnerConfig) -> bool:
    """True where attention on a GPU keeps a score for each pair of tokens: in Megatron's own layers."""
    return learner.backend == "megatron" and (learner.lora.rank > 0 or learner.transformer_engine == "off")


_COPIES = 5
"""Tensors of a gated product: gate and up in one (2), the activated gate, up again after its offset, their product."""


def norm_kept(columns: float, size: int, kernels: Kernels, norms: float = 1, *, frozen: bool = False) -> float:
    """Bytes of `norms` RMS norms over `columns` in all: inputs and the root of each, without outputs.

    `plain` computes in float32 and keeps the normed values, too, unless the weight is frozen.
    """
    return ((4 if frozen else 8) if kernels != "fused" else size) * columns + 4 * norms


def _experts(hf: Mapping[str, Any], learner: LearnerConfig, size: int, rows: float, adapted: Adapted) -> float:
    """Bytes of `rows` dispatched rows a token: rows, their products, the scaled product; routing; shared experts."""
    t, experts, top_k = learner.parallel.tensor, num_experts(hf), int(hf["num_experts_per_tok"])
    width = expert_width(hf) / learner.parallel.expert_tensor
    trains, trains_shared = (learner.lora.rank == 0 or kind in adapted.kinds for kind in ("experts", "shared experts"))
    routed = rows * (size * (trains * int(hf["hidden_size"]) + (_COPIES + trains) * width) + 4)
    # Weights as the dispatcher holds them and transposed in float32, the map as bytes and transposed, ids as int64.
    routing = (10 * experts + 28 * top_k) / t
    shared = shared_width(hf) / t
    return routed + routing + size * (_COPIES - (not trains_shared)) * shared


def _attention(hf: Mapping[str, Any], learner: LearnerConfig, kernels: Kernels) -> tuple[float, float]:
    """Bytes of a token, and of rotary angles for a column."""
    size, t = BYTES[learner.dtype], learner.parallel.tensor
    heads = int(hf["num_attention_heads"]) / t
    if "kv_lora_rank" in hf:
        return _latent(hf, size, heads), 4 * 4 * float(hf["qk_rope_head_dim"])
    dim = head_dim(hf)
    groups = int(hf["num_key_value_heads"]) / t
    family = sized_family_of(hf, "config.json")
    normed = family.megatron(hf).get("qk_layernorm", False)
    context = learner.parallel.context
    # Attention on a CPU has a copy of keys and values for every query head, of the columns of all ranks.
    copies = kernels != "fused" and (heads != groups or context > 1)
    projected = size * (heads + 2 * groups) * dim
    # Queries are cut out of the projection by a copy, keys and values are views of it.
    kept_bytes = size * 2 * heads * dim + 4 * heads  # rotated queries, weighted values, log-sum-exps
    kept_bytes += size * 2 * heads * dim * context if copies else size * groups * dim
    if kernels == "plain packed":
        kept_bytes += size * heads * dim  # weighted values once more, in the order of the pack
    if normed:
        frozen = learner.lora.rank > 0
        kept_bytes += norm_kept(heads * dim, size, kernels, heads, frozen=frozen)
        kept_bytes += _view_norm(groups * dim, size, kernels, groups, frozen=frozen)
    if normed or not copies:
        kept_bytes += projected
    rotated = dim * rotary_share(hf)
    # Cosines and sines, once for the queries and once for the keys. Layers share a pack's.
    is_shared = kernels == "plain packed" and rotated == dim and not family.yarn(hf)
    return kept_bytes, 0.0 if is_shared else 4 * size * rotated


def _view_norm(columns: float, size: int, kernels: Kernels, norms: float, *, frozen: bool) -> float:
    """As `norm_kept`, where the input is a view of what is kept anyway."""
    own_input = size * columns if kernels == "fused" or size == 4 else 0
    return norm_kept(columns, size, kernels, norms, frozen=frozen) - own_input


_CHUNK = 64
"""Tokens after which transformers' delta rule has a state."""


def _delta(hf: Mapping[str, Any], size: int) -> float:
    """The gated delta rule in transformers: projections, convolution, float32 copies, states. Not measured."""
    heads, dim = int(hf["linear_num_value_heads"]), int(hf["linear_key_head_dim"])
    keys, values = (int(hf[f"linear_num_{x}_heads"]) * int(hf[f"linear_{x}_head_dim"]) for x in ("key", "value"))
    convolved = size * (2 * (2 * keys + values) + 3 * values)
    wide = 4 * (3 * (2 * heads * dim + values) + 2 * heads * _CHUNK)
    return convolved + wide + 4 * dim * values / _CHUNK


def _latent(hf: Mapping[str, Any], size: int, heads: float) -> float:
    """Latent attention: queries, keys, values, weighted values; latents and their norms. Not measured."""
    key = int(hf["qk_nope_head_dim"]) + int(hf["qk_rope_head_dim"])
    value = int(hf["v_head_dim"])
    latents = int(hf["kv_lora_rank"]) + int(hf["qk_rope_head_dim"]) + int(hf.get("q_lora_rank") or 0)
    return size * (heads * (2 * key + 2 * value) + 2 * latents)
