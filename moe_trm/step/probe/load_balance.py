"""Balance of the experts under the rollout's routes, on probe steps. Shape letters: L MoE layers, E experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moe_trm.learner.protocol import Learner
from moe_trm.types import TokenBatch
from routing.replay.load import expert_load, load_entropy, load_imbalance


def load_balance(learner: Learner, batches: Sequence[TokenBatch]) -> dict[str, float]:
    """`routing/load_entropy` (1 is even) and `routing/load_max_over_mean` of the rollout's routes, means over layers.

    Collective: all ranks call it with their own batches of one step.
    """
    local_layers, layer_ids = learner.moe_layer_ids, learner.model_moe_layer_ids
    records = [record.select(local_layers) for batch in batches for record in batch.routes if record is not None]
    # A rank without rows knows no number of experts, and every rank must name the same sums.
    reduced = learner.reduce(
        {
            "experts": torch.tensor(float(records[0].num_experts if records else 0)),
            "ranks": torch.tensor(float(bool(records))),
        }
    )
    if not reduced["ranks"]:
        return {}
    num_experts = round(reduced["experts"] / reduced["ranks"])
    load = expert_load(records) if records else np.zeros((len(local_layers), num_experts), dtype=np.int64)
    places = [layer_ids.index(layer) for layer in local_layers]
    load_LE = torch.zeros(len(layer_ids), num_experts).double()
    load_LE[places] = torch.from_numpy(load).double()
    load_LE = learner.sum_over_stages(load_LE)
    total = learner.reduce({f"{layer}/{e}": n for layer, row in enumerate(load_LE) for e, n in enumerate(row)})
    whole_LE = np.array([[total[f"{layer}/{e}"] for e in range(num_experts)] for layer in range(len(layer_ids))])
    return {
        "routing/load_entropy": float(load_entropy(whole_LE).mean()),
        "routing/load_max_over_mean": float(load_imbalance(whole_LE).mean()),
    }
