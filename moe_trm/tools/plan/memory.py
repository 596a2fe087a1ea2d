"""Memory of one learner rank by kind, at the moment when it needs most: at the start of a backward pass.

Letters: d bytes of a number of `learner.dtype`, t tensor-parallel ranks, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from moe_trm.config.schema import LearnerConfig, ParallelConfig
from moe_trm.learner.megatron.stages import virtual_stages
from moe_trm.models.family import AttentionKind, FeedForwardKind
from moe_trm.models.hf_config import moe_layers
from moe_trm.models.nemotron_h import NEMOTRON_H
from moe_trm.models.registry import sized_family_of
from moe_trm.tools.plan.figures import Basis
from moe_trm.tools.plan.kept import BYTES, Kept, Kernels, layer_kept, norm_kept, one_part_kept
from moe_trm.tools.plan.merged import merged_bytes
from moe_trm.tools.plan.parameters import NO_ADAPTERS, Adapted, Model, held
from moe_trm.tools.plan.speed import layers_of

TILE_BYTES: Mapping[Kernels, int] = {"fused": 4 * 2**27, "plain": 4 * 2**21, "plain packed": 4 * 2**21}
"""The tile of logits on CUDA and on a CPU (`moe_trm/sampling_mask/dense.py`)."""
TILE_TOKENS = 4096
"""Tokens of a tile at most (`moe_trm/sampling_mask/dense.py`)."""
GATHERED_ROWS = 16384
"""Rows of the output weight gathered at once over kept ids (`moe_trm/sampling_mask/support.py`)."""
WIDE = 128
"""Beyond one kept id in so many, a product over the vocabulary replaces the gathered rows (`support.py` there)."""
BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default reduce bucket."""

MemoryKind = str
BASES: Mapping[MemoryKind, Basis] = {
    "weights": "given",
    "merged": "given",
    "vision tower": "given",
    "gradients": "given",
    "optimizer": "given",
    "activations": "assumed",
    "replay": "given",
    "logits head": "given",
    "backward": "assumed",
    "buckets": "given",
    "other": "assumed",
}
"""By kind: what it rests on. The same rules were measured for the layers of a CPU, not of GPUs."""


@dataclass(frozen=True)
class Load:
    """Work of a rank, beside the layout.

    Attributes:
        tokens: of the largest micro-batch, padding included.
        sampled: the scored ones among them.
        world: learner ranks.
        keeps_masks: log-probs are computed over the kept ids (`sampling_mask.mode=keep`), otherwise the vocabulary.
        replays: routes are replayed or recorded.
        other_gb: CUDA context, NCCL and the allocator's loss, 10^9 bytes.
        rows: of the micro-batch; its tokens are so many times its columns. A pack is one row.
        micro_batches: of a rank in a minibatch; None: more than there are pipeline stages.
        kept_ids: mean ids of a sampling mask.
    """

    tokens: int
    sampled: int
    world: int
    keeps_masks: bool
    replays: bool
    other_gb: float
    rows: int = 1
    micro_batches: int | None = None
    kept_ids: float = 3.3


def rank_elements(model: Model, parallel: ParallelConfig, stage: int) -> tuple[int, int]:
    """Parameters of a rank of this pipeline stage: outside the experts, and of experts."""
    last, shared = parallel.pipeline - 1, _shared(parallel)
    ends = [model.embedding] if stage == 0 else []
    if stage == last:
        # A tied output layer is a copy of the embedding wherever the two are on different ranks.
        ends += [model.final_norm, *([] if model.tied and last == 0 else [model.output])]
    by_layer = model.held_by_layer(*shared)
    held_parts = [by_layer[layer] for layer in layers_of(parallel, len(model.layers))[stage]] + [held(ends, *shared)]
    return sum(dense for dense, _ in held_parts), sum(experts for _, experts in held_parts)


def rank_factors(model: Model, parallel: ParallelConfig, stage: int) -> tuple[int, int]:
    """Parameters of adapters of a rank of this pipeline stage: outside the experts, and of experts."""
    layers = layers_of(parallel, len(model.layers))[stage]
    return held((part for layer in layers for part in model.adapter(layer).factors), *_shared(parallel))


def _shared(parallel: ParallelConfig) -> tuple[int, int]:
    """Ranks that share a tensor, and ranks that share the experts."""
    return parallel.tensor, parallel.expert * parallel.expert_tensor


def megatron_memory(
    model: Model, hf: Mapping[str, Any], learner: LearnerConfig, load: Load, kernels: Kernels = "fused"
) -> tuple[int, dict[MemoryKind, float]]:
    """The pipeline stage whose ranks need most, and bytes of each kind there."""
    by_stage = [stage_memory(model, hf, learner, load, stage, kernels) for stage in range(learner.parallel.pipeline)]
    most = max(range(len(by_stage)), key=lambda stage: sum(by_stage[stage].values()))
    return most, by_stage[most]


def stage_memory(
    model: Model, hf: Mapping[str, Any], learner: LearnerConfig, load: Load, stage: int, kernels: Kernels = "fused"
) -> dict[MemoryKind, float]:
    """Bytes of each kind on a rank of this pipeline stage.

    Weights d, gradients 4 (summed in float32), optimizer 8 for the two moments and 4 more for master weights below
    float32. `learner.distributed_optimizer` shares the last over the ranks that hold the same parameters, and
    `learner.offload_optimizer` has it on the host. Gradients are
    reduced within their own buffer, so buckets take nothing more. Backward begins with the head; where a layer needs
    more than the head, `backward` is what it needs more. With adapters their factors alone have gradients and
    optimizer, and `merged` are the weights that passes compute with.
    """
    parallel, size = learner.parallel, BYTES[learner.dtype]
    factors = rank_factors(model, parallel, stage)
    elements = rank_elements(model, parallel, stage)
    trained = sum(factors if learner.lora.rank else elements)
    state = 0 if learner.offload_optimizer else 8 if size == 4 else 12
    local = load.tokens / parallel.context
    layers = layers_of(parallel, len(model.layers))[stage]
    flight = in_flight(parallel, stage, load.micro_batches)
    is_last = stage == parallel.pipeline - 1
    head = head_bytes(hf, learner, load, kernels) if is_last else 0.0
    kept = activations(hf, learner, layers, local, flight, load.rows, kernels, model.adapters)
    shared = _shared(parallel)
    merged = merged_bytes([model.adapter(layer) for layer in layers], learner, lambda part: part.held(*shared))
    work = layer_work(hf, learner, layers, local, load.rows, kernels, model.adapters) + merged.work
    sent = (virtual_stages(parallel) or 1) - is_last if parallel.pipeline > 1 else 0
    kept += sent * flight * size * local * int(hf["hidden_size"]) / parallel.tensor
    if kernels != "fused" and parallel.tensor > 1:
        # Megatron's own buffer for gathered columns, which it never gives back.
        kept += size * local * int(hf["hidden_size"])
    return {
        "weights": size * (sum(elements) + sum(factors)),
        **({"merged": flight * merged.kept} if learner.lora.rank else {}),
        "gradients": 4 * trained,
        "optimizer": state * stepped_elements(model, learner, load.world, stage),
        "activations": kept,
        "replay": replay_bytes(hf, layers, local / parallel.tensor) * flight if load.replays else 0,
        "logits head": head,
        "backward": max(0.0, work - head),
        "buckets": 0,
        "other": load.other_gb * 1e9,
    }


def stepped_elements(model: Model, learner: LearnerConfig, world: int, stage: int) -> float:
    """Numbers that the optimizer of one rank steps: those that it trains, shared by `learner.distributed_optimizer`."""
    parallel = learner.parallel
    if learner.backend == "deepspeed":
        return (model.adapter_total if learner.lora.rank else model.total()) / world
    dense, experts = (rank_factors if learner.lora.rank else rank_elements)(model, parallel, stage)
    if not learner.distributed_optimizer:
        return dense + experts
    ranks = world // parallel.pipeline
    return dense / (ranks // parallel.tensor) + experts / (ranks // (parallel.expert * parallel.expert_tensor))


def in_flight(parallel: ParallelConfig, stage: int, micro_batches: int | None) -> float:
    """Micro-batches whose activations a pipeline stage holds at once.

    One forward, one backward: a stage holds one for each stage from it on. Virtual stages begin with more.
    """
    chunks = virtual_stages(parallel) or 1
    after = parallel.pipeline - stage - 1
    most = after + 1 if chunks == 1 else (2 * after + (chunks - 1) * parallel.pipeline + 1) / chunks
    return most if micro_batches is None else min(most, micro_batches)


def deepspeed_memory(
    model: Model, hf: Mapping[str, Any], learner: LearnerConfig, load: Load
) -> tuple[int, dict[MemoryKind, float]]:
    """As `megatron_memory` for ZeRO: stage 1 shares optimizer state, 2 also gradients, 3 also weights.

    At stage 3 the parameters of the largest layer are gathered, and the output weight for scoring. Activations are
    counted as Megatron's, although the layers are those of transformers. Merged weights are whole at every stage.
    """
    size, zero, total = BYTES[learner.dtype], learner.deepspeed.zero_stage, model.total()
    trained = model.adapter_total if learner.lora.rank else total
    shares = [load.world if zero >= level else 1 for level in (3, 2, 1)]
    gathered = max(sum(part.elements for part in layer) for layer in model.layers) + model.output.elements
    state = 0 if learner.offload_optimizer else (8 if size == 4 else 12) * trained / shares[2]
    layers = tuple(range(len(model.layers)))
    head = head_bytes(hf, learner, load)
    merged = merged_bytes(model.adapters, learner, lambda part: part.elements, stacked=True)
    kept = activations(hf, learner, layers, load.tokens, 1, load.rows, adapters=model.adapters)
    work = layer_work(hf, learner, layers, load.tokens, load.rows, adapters=model.adapters) + merged.work
    return 0, {
        "weights": size
        * ((total + model.adapter_total) / shares[0] + (gathered if zero == 3 and load.world > 1 else 0)),
        **({"merged": merged.kept} if learner.lora.rank else {}),
        **({"vision tower": tower_bytes(model, learner)} if model.vision else {}),
        "gradients": 4 * trained / shares[1],
        "optimizer": state,
        "activations": kept,
        "replay": replay_bytes(hf, layers, load.tokens) if load.replays else 0,
        "logits head": head,
        "backward": max(0.0, work - head),
        "buckets": 4 * min(BUCKET_ELEMENTS, trained) if load.world > 1 else 0,
        "other": load.other_gb * 1e9,
    }


def tower_bytes(model: Model, learner: LearnerConfig) -> float:
    """Weights of a frozen vision tower; of a trained one, which has one rank, also gradients and optimizer state.

    Its activations are not counted.
    """
    size = BYTES[learner.dtype]
    state = 0 if learner.offload_optimizer else 8 if size == 4 else 12
    return model.vision * (size + (0 if learner.freeze_vision else 4 + state))


def activations(
    hf: Mapping[str, Any],
    learner: LearnerConfig,
    layers: Sequence[int],
    tokens: float,
    in_flight: float,
    rows: int = 1,
    kernels: Kernels = "fused",
    adapters: Sequence[Adapted] = (),
) -> float:
    """Bytes kept for backward by these layers, for `in_flight` micro-batches of `tokens` tokens in `rows` rows.

    `full` keeps a layer's input. `selective` keeps all but the inside of MLP and MoE layers.
    """
    kept = 0.0
    for layer in _layers(hf, learner, layers, kernels, adapters):
        scores = layer.scores * tokens / rows
        a_token = {
            "none": layer.whole + scores,
            "selective": layer.outside + scores,
            "full": layer.entry,
        }[learner.recompute]
        kept += a_token * tokens + (0 if learner.recompute == "full" else layer.columns * tokens / rows)
    return kept * in_flight


def layer_work(
    hf: Mapping[str, Any],
    learner: LearnerConfig,
    layers: Sequence[int],
    tokens: float,
    rows: int = 1,
    kernels: Kernels = "fused",
    adapters: Sequence[Adapted] = (),
) -> float:
    """Bytes while one layer runs backward, beside what was kept: what it computes again, and gradients on their way."""
    layers_kept = _layers(hf, learner, layers, kernels, adapters)
    if not layers_kept:
        return 0.0
    if learner.recompute == "none":
        # The last layer is the first: behind it, kept tensors are given back.
        return layers_kept[-1].gradients * tokens
    if learner.recompute == "selective":
        return tokens * max(layer.inside + layer.gradients for layer in layers_kept)
    return max(
        tokens * (layer.whole + layer.gradients + layer.scores * tokens / rows) + layer.columns * tokens / rows
        for layer in layers_kept
    )


def _layers(
    hf: Mapping[str, Any],
    learner: LearnerConfig,
    layers: Sequence[int],
    kernels: Kernels,
    adapters: Sequence[Adapted],
) -> list[Kept]:
    family = sized_family_of(hf, "config.json")
    if family is NEMOTRON_H:
        return [one_part_kept(hf, learner, family.layer(hf, number)) for number in layers]

    @cache
    def kept(attention: AttentionKind, feed_forward: FeedForwardKind, adapted: Adapted) -> Kept:
        is_moe, is_delta = feed_forward == "experts", attention == "gated delta"
        return layer_kept(hf, learner, kernels, is_moe=is_moe, adapted=adapted, is_delta=is_delta)

    layer_pairs = ((family.layer(hf, number), adapters[number] if adapters else NO_ADAPTERS) for number in layers)
    return [kept(layer.attention, layer.feed_forward, adapted) for layer, adapted in layer_pairs]


def replay_bytes(hf: Mapping[str, Any], layers: Sequence[int], tokens: float) -> float:
    """Routes of a micro-batch on the device: int64 ids to replay, and int64 ids of the second cut that proves them."""
    moe = frozenset(moe_layers(hf))
    return tokens * sum(layer in moe for layer in layers) * int(hf.get("num_experts_per_tok") or 0) * 16


def head_bytes(hf: Mapping[str, Any], learner: LearnerConfig, load: Load, kernels: Kernels = "fused") -> float:
    """Final norm and log-probs from hidden states (`moe_trm/learner/scoring.py`), when backward begins.

    There never are full logits. There are the hidden states of scored tokens and their float32 gradient, the float32
    gradient of the output weight, and one tile of logits or the gathered rows of kept ids. Below float32 both gradients
    are there once more in `learner.dtype`. With adapters the output weight has no gradient.
    """
    size, hidden, context = BYTES[learner.dtype], int(hf["hidden_size"]), learner.parallel.context
    t = learner.parallel.tensor
    vocabulary = -(-int(hf["vocab_size"]) // t)
    gradient, frozen = 4 if size == 4 else 4 + size, learner.lora.rank > 0
    scored = load.sampled / context
    norm = load.tokens / context * norm_kept(hidden, size, kernels, frozen=frozen) / t
    states = scored * hidden * (size + gradient)
    if not load.keeps_masks:
        tile = min(TILE_BYTES[kernels], 4 * min(scored, TILE_TOKENS) * vocabulary)
    elif load.kept_ids * WIDE > int(hf["vocab_size"]):
        tile = 4 * min(GATHERED_ROWS * hidden, scored * vocabulary)
    else:
        tile = 8 * hidden * min(GATHERED_ROWS, scored * load.kept_ids)
    return norm + states + (0 if frozen else gradient * vocabulary * hidden) + tile
