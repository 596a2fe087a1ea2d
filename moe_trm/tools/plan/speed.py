"""Tokens per second of servers and learner by a roofline, or as measured.

Decoding reads the weights of every expert that some request chose, and each request's keys and values. Training costs
6 operations for each active parameter and token, recomputation up to 2 more, a pass of log-probs 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from moe_trm.config.anchor_passes import scores_every_minibatch
from moe_trm.config.schema import Config, LearnerConfig, ParallelConfig, RolloutConfig
from moe_trm.learner.megatron.stages import layers_by_rank, virtual_stages
from moe_trm.models.hf_config import head_dim, num_experts
from moe_trm.models.registry import sized_family_of
from moe_trm.tools.plan.columns import data_ranks
from moe_trm.tools.plan.figures import Basis
from moe_trm.tools.plan.gpus import Gpu
from moe_trm.tools.plan.merged import FEED_FORWARD
from moe_trm.tools.plan.parameters import Model

LATENCY_S = 1e-5
"""Seconds of a sum over the GPUs of a server within a node."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet that are reached, and what was measured instead.

    Attributes:
        decode_bandwidth: of memory bandwidth while decoding.
        train_flops: of dense products while training computes; waiting and exchange come on top.
        load_gb_s: 10^9 bytes per second of weights into the servers.
        node_gb_s: 10^9 bytes per second of a GPU to and from other nodes.
        host_gb_s: 10^9 bytes per second of a rank's optimizer on the host.
        rollout_tokens_s: of one full server, measured; None: roofline.
        learner_tokens_s: of all learner ranks, measured with the run's own settings; None: from operations.
        sharing: speed of servers and learner while both compute, as a share of their speed alone.
    """

    decode_bandwidth: float = 0.5
    train_flops: float = 0.35
    load_gb_s: float = 20.0
    node_gb_s: float = 50.0
    host_gb_s: float = 20.0
    rollout_tokens_s: float | None = None
    learner_tokens_s: float | None = None
    sharing: float = 1.0

    @property
    def rollout_basis(self) -> Basis:
        return "assumed" if self.rollout_tokens_s is None else "measured"

    @property
    def learner_basis(self) -> Basis:
        return "assumed" if self.learner_tokens_s is None else "measured"


def cache_bytes(hf: Mapping[str, Any], gpus: int) -> float:
    """Bytes of keys and values of one token on one GPU of a server, in bfloat16.

    Latent attention keeps one latent, which every GPU holds. Other key/value heads are shared, at least one a GPU.
    """
    layers = sized_family_of(hf, "config.json").num_cached(hf)
    if "kv_lora_rank" in hf:
        return 2.0 * layers * (int(hf["kv_lora_rank"]) + int(hf["qk_rope_head_dim"]))
    return 2.0 * layers * 2 * max(1.0, int(hf["num_key_value_heads"]) / gpus) * head_dim(hf)


def decode_rate(
    model: Model,
    hf: Mapping[str, Any],
    gpu: Gpu,
    gpus: int,
    context: float,
    efficiency: Efficiency,
    slots: int,
    node_gpus: int = 8,
) -> Callable[[int], float]:
    """Tokens per second of one of `n` requests on a server of `gpus` GPUs, `context` tokens long in the mean.

    Experts that n requests touch: E (1 - (1 - K/E)^n), as if they were chosen evenly. Several GPUs sum twice a layer,
    which takes `LATENCY_S`, beyond a node four times as long. A measured speed scales the whole curve, so that `slots`
    requests together reach it.
    """
    experts, top_k = num_experts(hf), int(hf.get("num_experts_per_tok") or 0)
    routed, rest = model.by_kind.get("experts", (0, 0))[0], model.total(("embedding", "experts"))
    cache = cache_bytes(hf, gpus) * context
    summing = 2 * len(model.layers) * LATENCY_S * (0 if gpus == 1 else 1 if gpus <= node_gpus else 4)

    def roofline(n: int) -> float:
        touched = routed * (1 - (1 - top_k / experts) ** n) if experts else 0.0
        moved = 2 * (rest + touched) / gpus + n * cache
        reading = moved / (gpu.bandwidth_gb_s * 1e9 * efficiency.decode_bandwidth)
        computing = 2 * model.active(("embedding",)) * n / gpus / (gpu.tflops * 1e12 * efficiency.decode_bandwidth)
        return 1 / (max(reading, computing) + summing)

    measured = efficiency.rollout_tokens_s
    scale = 1.0 if measured is None else measured / (slots * roofline(slots))
    return lambda n: scale * roofline(n)


def anchor_passes(config: Config, older: float = 1.0) -> float:
    """Passes of log-probs alone over a batch (`moe_trm/step/anchors.py`).

    One under the weights of the step's start, but not over the first minibatch where nothing is stale and nothing needs
    it. With `pipeline.behavior=snapshot` stale batches need one more for each version that sampled them.

    Args:
        config: of the run.
        older: versions before the learner's that sampled a stale batch, in the mean.
    """
    pipeline, learner = config.pipeline, config.learner
    if pipeline.recovery == "same":
        if pipeline.proximal == "average":
            return 2.0
        own_forward = config.replay.mode != "R2" and not scores_every_minibatch(
            config.record, config.learner, config.optimizer, config.kl, config.advantage
        )
        return 1 - 1 / learner.minibatches if own_forward else 1.0
    return {"snapshot": 1.0 + older, "merged": 1.0}.get(pipeline.recovery, 0.0)


def training_operations(
    model: Model, hf: Mapping[str, Any], config: Config, context: float, older: float = 1.0
) -> float:
    """Operations per token of a training step, with attention over half of `context` tokens in the mean.

    `older`: as of `anchor_passes`.
    """
    learner = config.learner
    if "kv_lora_rank" in hf:
        columns = int(hf["qk_nope_head_dim"]) + int(hf["qk_rope_head_dim"]) + int(hf["v_head_dim"])
    else:
        columns = 2 * head_dim(hf)
    attention = 2 * model.caching * int(hf["num_attention_heads"]) * columns * context / 2
    forward = 2 * model.active(("embedding",)) + attention
    inside = 2 * sum(active for kind, (_, active) in model.by_kind.items() if kind in FEED_FORWARD)
    again = {"none": 0.0, "selective": inside, "full": forward}[learner.recompute]
    return forward * (3 * learner.epochs + anchor_passes(config, older)) + again * learner.epochs


def micro_batches(learner: LearnerConfig, rollout: RolloutConfig, tokens: float, world: int) -> float:
    """Micro-batches of a rank in a minibatch of a step of `tokens` tokens."""
    return max(1.0, tokens / learner.minibatches / data_ranks(learner, world) / micro_batch_tokens(learner, rollout, 0))


@lru_cache(maxsize=1024)
def layers_of(parallel: ParallelConfig, number: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of the layers of each pipeline rank; virtual stages take turns."""
    return tuple(layers_by_rank(parallel, number))


def bubble(learner: LearnerConfig, rollout: RolloutConfig, num_layers: int, tokens: float, world: int) -> float:
    """Share of a minibatch in which a pipeline rank waits in the mean: 1 - v m / (v m + P - 1) * mean / largest.

    m micro-batches of a rank; mean and largest number of layers of a rank. The embedding and the loss count nothing.
    """
    parallel = learner.parallel
    if parallel.pipeline == 1 or learner.backend != "megatron":
        return 0.0
    chunks = (virtual_stages(parallel) or 1) * micro_batches(learner, rollout, tokens, world)
    largest = max(len(layers) for layers in layers_of(parallel, num_layers))
    return 1 - chunks / (chunks + parallel.pipeline - 1) * num_layers / (parallel.pipeline * largest)


def micro_batch_tokens(learner: LearnerConfig, rollout: RolloutConfig, prompt_tokens: float) -> int:
    """Tokens of the largest micro-batch: the budget, or rows of the longest sequence."""
    longest = rollout.max_tokens or int(rollout.max_new_tokens + prompt_tokens)
    if learner.micro_batch_tokens:
        return max(learner.micro_batch_tokens, 1)
    return longest * (learner.micro_batch_rows or 32)


def train_seconds(
    model: Model,
    hf: Mapping[str, Any],
    config: Config,
    gpu: Gpu,
    world: int,
    tokens: float,
    context: float,
    efficiency: Efficiency,
    columns: float = 1.0,
) -> float:
    """Seconds of training one batch of `tokens` tokens, prompts included, on `world` ranks.

    `columns` are computed for each of them (`moe_trm/tools/plan/columns.py`); a measured speed has them in it. A
    minibatch takes as long as the rank with the longest answer, which may be more than its share.
    """
    if efficiency.learner_tokens_s is not None:
        return tokens / efficiency.learner_tokens_s
    speed = world * gpu.tflops * 1e12 * efficiency.train_flops
    share = tokens / config.learner.minibatches / data_ranks(config.learner, world)
    longest = max(1.0, (config.rollout.max_tokens or config.rollout.max_new_tokens) / share)
    busy = longest * tokens * columns * training_operations(model, hf, config, context) / speed
    return busy / (1 - bubble(config.learner, config.rollout, len(model.layers), tokens, world))
