"""Memory that a configuration needs on each side, by the planner's rules and its usual assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from moe_trm.config.schema import Config
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.registry import sized_family
from moe_trm.rollout.servers.placement import gpus_of
from moe_trm.tools.plan.build import Assumptions, Work, changed
from moe_trm.tools.plan.candidates import judge
from moe_trm.tools.plan.cluster import Cluster, serving
from moe_trm.tools.plan.gpus import gpu_of
from moe_trm.tools.plan.lengths import log_normal
from moe_trm.tools.plan.speed import Efficiency

SIGMA, PROMPT_TOKENS, KEPT_IDS, OTHER_GB = 0.8, 512.0, 3.3, 4.0
"""As the options of `moe-trm plan`."""


@dataclass(frozen=True)
class Needs:
    """Bytes of a learner rank, and of a GPU of a server with what a colocated learner keeps there."""

    rank_bytes: float
    server_bytes: float


def needs(config: Config, world_size: int, *, fused: bool) -> Needs | None:
    """Of a run with so many learner ranks; None where its model has no family.

    Raises `ConfigError`, `CheckpointError` for one that is refused.

    `fused`: with the layers of Transformer Engine, whatever this machine has.
    """
    if fused:
        config = changed(config, "learner", transformer_engine="auto")
    longest, where = config.rollout.max_new_tokens, f"{config.model.checkpoint}/config.json"
    hf = read_hf_config(config.model.checkpoint)
    if sized_family(hf) is None:
        return None
    lengths = log_normal(max(1.0, longest / 4), SIGMA, longest, PROMPT_TOKENS)
    work = Work(hf, Assumptions(Efficiency(), lengths, KEPT_IDS, OTHER_GB), where)
    model, size = work.model(config), max(1, gpus_of(config.rollout))
    judged = judge(config, model, hf, work.load(config, world_size), work.step_tokens(config), where)
    held = judged.resident if config.rollout.colocate else 0.0
    cluster = Cluster(1, size, gpu_of("h100"), 1)
    return Needs(judged.total, serving(config.rollout, model, hf, cluster, size, held).bytes_per_gpu)
