"""Memory of one learner rank by kind.

Letters: d bytes of a number of `learner.dtype`, T tokens of a micro-batch on the rank, t tensor-parallel ranks,
H hidden size, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_trm.config.schema import LearnerConfig, ParallelConfig
from moe_trm.learner.megatron.stages import layers_by_rank, virtual_stages
from moe_trm.models.hf_config import expert_width, moe_layers, num_experts
from moe_trm.plan.figures import Basis
from moe_trm.plan.parameters import Model, Part

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TILE_BYTES = 4 * 2**27
"""The tile of logits on CUDA (`moe_trm/sampling_mask/dense.py`)."""
GATHERED_ROWS = 16384
"""Rows of the output weight gathered at once over kept ids (`moe_trm/sampling_mask/support.py`)."""
BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default reduce bucket."""

MemoryKind = str
BASES: Mapping[MemoryKind, Basis] = {
    "weights": "given",
    "gradients": "given",
    "optimizer": "given",
    "activations": "assumed",
    "replay": "given",
    "logits head": "given",
    "buckets": "given",
    "other": "assumed",
}
"""By kind: what it rests on. The activations of a layer are counted from its tensors, and were not measured on GPUs."""


@dataclass(frozen=True)
class Load:
    """Work of a rank, beside the layout.

    Attributes:
        tokens: of the largest micro-batch, padding included.
        sampled: those of them that are scored.
        world: learner ranks.
        keeps_masks: log-probs are computed over the kept ids (`sampling_mask.mode=keep`), otherwise the vocabulary.
        replays: routes are replayed or recorded.
        other_gb: CUDA context, NCCL and the allocator's loss, 10^9 bytes.
    """

    tokens: int
    sampled: int
    world: int
    keeps_masks: bool
    replays: bool
    other_gb: float


def stage_layers(model: Model, parallel: ParallelConfig) -> list[tuple[int, ...]]:
    """Numbers of the layers of each pipeline rank; virtual stages take turns."""
    return layers_by_rank(parallel, len(model.layers))


def rank_elements(model: Model, parallel: ParallelConfig, stage: int) -> tuple[int, int]:
    """Parameters of a rank of this pipeline stage: outside the experts, and of experts."""
    last = parallel.pipeline - 1
    parts = [part for layer in stage_layers(model, parallel)[stage] for part in model.layers[layer]]
    if stage == 0:
        parts.append(model.embedding)
    if stage == last:
        # A tied output layer is a copy of the embedding wherever the two are on different ranks.
        parts += [model.final_norm, *([] if model.tied and last == 0 else [model.output])]
    return _sum(parts, parallel, experts=False), _sum(parts, parallel, experts=True)


def _sum(parts: Sequence[Part], parallel: ParallelConfig, *, experts: bool) -> int:
    sizes = {"whole": 1, "tensor": parallel.tensor, "expert": parallel.expert * parallel.expert_tensor}
    return sum(part.elements // sizes[part.share] for part in parts if (part.share == "expert") == experts)


def megatron_memory(
    model: Model, hf: Mapping[str, Any], learner: LearnerConfig, load: Load
) -> tuple[int, dict[MemoryKind, float]]:
    """The pipeline stage whose ranks need most, and bytes of each kind there.

    Weights d, gradients 4 (summed in float32), optimizer 8 for the two moments and 4 more for master weights below
    float32. `learner.distributed_optimizer` shares the last over the ranks that hold the same parameters. Gradients are
    reduced within their own buffer, so buckets take nothing more.
    """
    found = [_stage(model, hf, learner, load, stage) for stage in range(learner.parallel.pipeline)]
    most = max(range(len(found)), key=lambda stage: sum(found[stage].values()))
    return most, found[most]


def _stage(
    model: Model, hf: Mapping[str, Any], learner: LearnerConfig, load: Load, stage: int
) -> dict[MemoryKind, float]:
    parallel, size = learner.parallel, BYTES[learner.dtype]
    dense, experts = rank_elements(model, parallel, stage)
    state = 8 if size == 4 else 12
    sharers = (1, 1)
    if learner.distributed_optimizer:
        sharers = (
            load.world // (parallel.tensor * parallel.pipeline),
            load.world // (parallel.expert * parallel.expert_tensor * parallel.pipeline),
        )
    local = load.tokens / parallel.context
    layers = stage_layers(model, parallel)[stage]
    # One forward, one backward: a stage holds a micro-batch for each stage from it on. Virtual stages begin with more.
    chunks = virtual_stages(parallel) or 1
    after = parallel.pipeline - stage - 1
    in_flight = after + 1 if chunks == 1 else (2 * after + (chunks - 1) * parallel.pipeline + 1) / chunks
    is_last = stage == parallel.pipeline - 1
    return {
        "weights": size * (dense + experts),
        "gradients": 4 * (dense + experts),
        "optimizer": state * (dense / sharers[0] + experts / sharers[1]),
        "activations": activations(hf, learner, layers, local, in_flight),
        "replay": replay_bytes(hf, layers, local / parallel.tensor) * in_flight if load.replays else 0,
        "logits head": head_bytes(hf, learner, load) if is_last else 0,
        "buckets": 0,
        "other": load.other_gb * 1e9,
    }


def deepspeed_memory(
    model: Model, hf: Mapping[str, Any], learner: LearnerConfig, load: Load
) -> tuple[int, dict[MemoryKind, float]]:
    """As `megatron_memory` for ZeRO: stage 1 shares optimizer state, 2 also gradients, 3 also weights.

    At stage 3 the parameters of the largest layer are gathered, and the output weight for scoring.
    """
    size, zero, total = BYTES[learner.dtype], learner.deepspeed.zero_stage, model.total()
    shares = [load.world if zero >= level else 1 for level in (3, 2, 1)]
    gathered = max(sum(part.elements for part in layer) for layer in model.layers) + model.output.elements
    state = 0 if learner.deepspeed.offload_optimizer else (8 if size == 4 else 12) * total / shares[2]
    layers = tuple(range(len(model.layers)))
    return 0, {
        "weights": size * (total / shares[0] + (gathered if zero == 3 and load.world > 1 else 0)),
        "gradients": 4 * total / shares[1],
        "optimizer": state,
        "activations": activations(hf, learner, layers, load.tokens, 1),
        "replay": replay_bytes(hf, layers, load.tokens) if load.replays else 0,
        "logits head": head_bytes(hf, learner, load),
        "buckets": 4 * min(BUCKET_ELEMENTS, total) if load.world > 1 else 0,
        "other": load.other_gb * 1e9,
    }


def activations(
    hf: Mapping[str, Any], learner: LearnerConfig, layers: Sequence[int], tokens: float, in_flight: float
) -> float:
    """Bytes kept for backward by these layers, and those of the layer that is computed again.

    `full` keeps a layer's input. `selective` keeps all but the inside of MLP and MoE layers. Attention is assumed to
    keep no scores, as flash attention does.
    """
    kept, again = 0.0, 0.0
    moe = frozenset(moe_layers(hf))
    for layer in layers:
        outside, inside = _layer_numbers(hf, learner.parallel, is_moe=layer in moe)
        whole = outside + inside
        entry = int(hf["hidden_size"]) / learner.parallel.tensor
        kept += {"none": whole, "selective": outside, "full": entry}[learner.recompute]
        again = max(again, {"none": 0.0, "selective": inside, "full": whole}[learner.recompute])
    return BYTES[learner.dtype] * tokens * (kept * in_flight + again)


def _layer_numbers(hf: Mapping[str, Any], parallel: ParallelConfig, *, is_moe: bool) -> tuple[float, float]:
    """Numbers per token that a layer keeps on one rank: outside its feed-forward part, and inside it."""
    hidden, heads, t = int(hf["hidden_size"]), int(hf["num_attention_heads"]), parallel.tensor
    if "kv_lora_rank" in hf:
        key = int(hf["qk_nope_head_dim"]) + int(hf["qk_rope_head_dim"])
        value = int(hf["v_head_dim"])
        columns = heads * (2 * key + 2 * value)
        latents = int(hf["kv_lora_rank"]) + int(hf["qk_rope_head_dim"]) + int(hf.get("q_lora_rank") or 0)
    else:
        size, groups = int(hf.get("head_dim") or hidden // heads), int(hf["num_key_value_heads"])
        columns, latents = (2 * heads + 2 * groups) * size, 0
    # Input and normed input of attention and of the feed-forward part; queries, keys, values, weighted values.
    outside = 4 * hidden / t + columns / t + 2 * latents
    if not is_moe:
        return outside, 3 * int(hf["intermediate_size"]) / t
    width, top_k = expert_width(hf), int(hf["num_experts_per_tok"])
    shared = int(hf.get("n_shared_experts") or 0) * width
    # Rows as dispatched and as they come back, two planes and their product inside; float32 input of the router.
    routed = top_k * (2 * hidden + 3 * width / parallel.expert_tensor) / t
    router = (2 * hidden + 3 * num_experts(hf)) / t
    return outside, routed + router + 3 * shared / t


def replay_bytes(hf: Mapping[str, Any], layers: Sequence[int], tokens: float) -> float:
    """Routes of a micro-batch on the device: int64 ids to replay, and narrow ids of the second cut that proves them."""
    moe = frozenset(moe_layers(hf))
    narrow = 1 if num_experts(hf) <= 256 else 4
    return tokens * sum(layer in moe for layer in layers) * int(hf.get("num_experts_per_tok") or 0) * (8 + narrow)


def head_bytes(hf: Mapping[str, Any], learner: LearnerConfig, load: Load) -> float:
    """Log-probs from hidden states (`moe_trm/learner/scoring.py`): never full logits.

    The float32 gradient of the output weight, that of the hidden states, and either one tile of logits or the gathered
    rows of kept ids.
    """
    hidden = int(hf["hidden_size"])
    rows = -(-int(hf["vocab_size"]) // learner.parallel.tensor)
    tile = 4 * 2 * GATHERED_ROWS * hidden if load.keeps_masks else min(TILE_BYTES, 4 * load.sampled * rows)
    return (4 + BYTES[learner.dtype]) * rows * hidden + 8 * load.sampled / learner.parallel.context * hidden + tile
