"""Routing metrics of a probe: flips between the two engines by layer, and the expert load of the rollout's routes.

Shape letters: B rows, R forwarded tokens, L MoE layers of the model, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_trm.learner.protocol import Learner, Scores
from moe_trm.types import TokenBatch
from routing.flips import flipped_tokens
from routing.load import expert_load, load_entropy, load_imbalance


def route_metrics(learner: Learner, batches: Sequence[TokenBatch], native: Sequence[Scores]) -> dict[str, float]:
    """Collective: all ranks call it with their own batches of one step.

    Args:
        learner: reduces over the ranks.
        batches: with the rollout's routes.
        native: what scoring the batches with `Record()` gave.

    Returns:
        `routing/flip_rate/layer_<id>`: share of scored tokens whose expert set the two engines choose differently;
        `routing/load_entropy` (1 is even) and `routing/load_max_over_mean` of the rollout's routes, means over layers.
    """
    own, layer_ids = learner.moe_layer_ids, learner.model_moe_layer_ids
    records = [record.select(own) for batch in batches for record in batch.routes if record is not None]
    # A rank without rows knows no number of experts, and every rank must name the same sums.
    known = learner.reduce(
        {
            "experts": torch.tensor(float(records[0].num_experts if records else 0)),
            "ranks": torch.tensor(float(bool(records))),
        }
    )
    if not known["ranks"]:
        return {}
    num_experts = round(known["experts"] / known["ranks"])
    load = expert_load(records) if records else np.zeros((len(own), num_experts), dtype=np.int64)
    places = [layer_ids.index(layer) for layer in own]
    load_LE, flips_L = torch.zeros(len(layer_ids), num_experts).double(), torch.zeros(len(layer_ids)).double()
    load_LE[places], flips_L[places] = torch.from_numpy(load).double(), _flips(batches, native, len(own))
    load_LE, flips_L = learner.sum_over_stages(load_LE), learner.sum_over_stages(learner.sum_over_slices(flips_L))
    sums = {f"{layer}/{e}": n for layer, row in enumerate(load_LE) for e, n in enumerate(row)}
    flips = {f"{layer}": value for layer, value in enumerate(flips_L)}
    total = learner.reduce({**sums, **flips, "tokens": torch.tensor(float(sum(int(b.mask.sum()) for b in batches)))})
    whole_LE = np.array([[total[f"{layer}/{e}"] for e in range(num_experts)] for layer in range(len(layer_ids))])
    rates = {
        f"routing/flip_rate/layer_{layer}": total[f"{place}"] / max(total["tokens"], 1.0)
        for place, layer in enumerate(layer_ids)
    }
    return {
        **rates,
        "routing/load_entropy": float(load_entropy(whole_LE).mean()),
        "routing/load_max_over_mean": float(load_imbalance(whole_LE).mean()),
    }


def _flips(batches: Sequence[TokenBatch], native: Sequence[Scores], num_layers: int) -> Tensor:
    flips_L = torch.zeros(num_layers, dtype=torch.float64)
    for batch, scores in zip(batches, native, strict=True):
        assert scores.recorded is not None
        flips_L += flipped_tokens(scores.recorded, batch.routes, batch.mask.shape[1])[batch.mask.cpu()].sum(0)
    return flips_L
