"""Seconds in which ranks of the learner exchange tokens and gradients, or step on the host.

Every byte is counted as if nothing were computed meanwhile. Letters: d bytes of a number of `learner.dtype`, t
tensor-parallel and c context-parallel ranks, H hidden size, K experts per token, e ranks that share the experts.
"""

from __future__ import annotations

from moe_trm.config.schema import Config
from moe_trm.models.family import HfConfig
from moe_trm.models.hf_config import head_dim, moe_layers
from moe_trm.tools.plan.columns import data_ranks
from moe_trm.tools.plan.gpus import Gpu
from moe_trm.tools.plan.kept import BYTES
from moe_trm.tools.plan.memory import rank_elements, rank_factors, stepped_elements
from moe_trm.tools.plan.parameters import Model
from moe_trm.tools.plan.speed import Efficiency, anchor_passes, micro_batches

HOST_BYTES = 34
"""Bytes that a step on the host moves for each number: two moments and the weight both ways, the gradient to the host
and into the step, and 16 bits of the weight back."""


def exchange_seconds(
    model: Model,
    hf: HfConfig,
    config: Config,
    gpu: Gpu,
    node_gpus: int,
    world: int,
    tokens: float,
    efficiency: Efficiency,
) -> float:
    """Seconds of exchange in one training step.

    Tensor ranks gather and scatter each token twice a layer: 4 H d (t - 1) / t bytes. Experts get it and give it
    back: 2 K H d (e - 1) / (e t). Context ranks pass keys and values on. Each optimizer step reduces gradients in
    float32 and gathers weights. ZeRO 3 gathers all weights for each pass of a micro-batch. Links within a node are
    those of the data sheet; what leaves it goes at `efficiency.node_gb_s`.

    Args:
        model, hf: the model, and its config.json.
        config: of the run.
        gpu, node_gpus: one GPU, and their number in a node.
        world: learner ranks.
        tokens: of the step, prompts included.
        efficiency: shares of the data sheet.
    """
    learner, parallel = config.learner, config.learner.parallel
    size, steps = BYTES[learner.dtype], learner.minibatches * learner.epochs

    def seconds(nbytes: float, group: int) -> float:
        inside = min(1.0, node_gpus / group)
        return nbytes * (inside / gpu.link_gb_s + (1 - inside) / efficiency.node_gb_s) / 1e9

    host = 0.0
    if learner.offload_optimizer:
        stepped = max(stepped_elements(model, learner, world, stage) for stage in range(parallel.pipeline))
        host = steps * stepped * HOST_BYTES / (efficiency.host_gb_s * 1e9)
    passes = anchor_passes(config, 0.0) + learner.epochs * (2 + (learner.recompute == "full"))
    trained = sum(rank_factors(model, parallel, 0) if learner.lora.rank else rank_elements(model, parallel, 0))
    if learner.backend == "deepspeed":
        stepped = stepped_elements(model, learner, 1, 0)
        gathered = passes * steps * micro_batches(learner, config.rollout, tokens, world) / learner.epochs
        gathers = gathered if learner.deepspeed.zero_stage == 3 else float(steps)
        return host + seconds(steps * 4 * stepped + gathers * size * model.total(), world)
    tensor, experts, context = parallel.tensor, parallel.expert * parallel.expert_tensor, parallel.context
    hidden, layers = size * int(hf["hidden_size"]), len(model.layers) / parallel.pipeline
    rank_tokens = passes * tokens / data_ranks(learner, world) / context
    shared = 4 * hidden * (tensor - 1) / tensor * layers + (context - 1) * size * _keys_and_values(hf) / tensor * layers
    mixtures = len(moe_layers(hf)) / parallel.pipeline
    routed = 2 * int(hf.get("num_experts_per_tok") or 0) * hidden * (experts - 1) / experts / tensor * mixtures
    stage = world // parallel.pipeline
    reduced = (4 + size) * trained if stage > max(tensor, experts) else 0
    return (
        host
        + seconds(rank_tokens * shared, tensor * context)
        + seconds(rank_tokens * routed, experts)
        + seconds(steps * reduced, stage)
    )


def _keys_and_values(hf: HfConfig) -> float:
    """Columns of a token in a layer."""
    if "kv_lora_rank" in hf:
        return int(hf["num_attention_heads"]) * (
            int(hf["qk_nope_head_dim"]) + int(hf["qk_rope_head_dim"]) + int(hf["v_head_dim"])
        )
    return 2 * int(hf["num_key_value_heads"]) * head_dim(hf)
