"""Models whose servers are refused, because no server tells here which tokens its attention saw."""

from __future__ import annotations

from moe_trm.errors import CheckpointError
from moe_trm.models.family import HfConfig
from moe_trm.models.registry import indexer_layers


def check_indexer(hf: HfConfig, where: str) -> None:
    """Refuse sparse attention: the learner replays the positions that an indexer chose, and a server sends none.

    SGLang 0.5.23 has `enable_return_indexer_topk`, on CUDA and NPU only. The numbers that it sends are those of cache
    slots, not of tokens, unless its environment has SGLANG_DSA_FUSE_TOPK=0. Nothing of that was run here.

    Raises:
        CheckpointError: a layer of the model has sparse attention.
    """
    if indexer_layers(hf):
        raise CheckpointError(
            "a server sends no positions that the indexer of sparse attention chose, and replay needs them",
            where=f"{where}, architectures",
            got=hf["architectures"][0],
            expected="a family that docs/models.md has for this engine",
            fix="Train it on a recording with rollout.engine=bundle, or with an engine of your own.",
        )
