"""Balance of the load that routes put on the experts.

Under replay this describes the rollout's routing. A `Record` pass gives natural routing.

Shape letters: T rows, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from routing.errors import RouteError
from routing.record.record import RouteRecord


def expert_load(records: Iterable[RouteRecord]) -> np.ndarray:
    """`[L, E]` int64: how often each expert was chosen, over the rows that have routes. Sums of loads are loads.

    Raises:
        RouteError: `layers`, when the records are of different models; `rows`, when there are none.
    """
    total: np.ndarray | None = None
    model: tuple[tuple[int, ...], int] | None = None
    for record in records:
        record_model = (record.layer_ids, record.num_experts)
        if model is None or total is None:
            model, total = record_model, np.zeros((len(record.layer_ids), record.num_experts), dtype=np.int64)
        if record_model != model:
            raise RouteError(
                "layers", "records of different models have no common load", got=record_model, expected=model
            )
        layers = len(record.layer_ids)
        ids = record.experts[record.coverage()] + np.arange(layers)[:, None] * record.num_experts
        total += np.bincount(ids.ravel(), minlength=total.size).reshape(total.shape)
    if total is None:
        raise RouteError("rows", "no records to count", got=0, expected="at least one")
    return total


def load_entropy(load: np.ndarray) -> np.ndarray:
    """`[L]` entropy of the load over its largest value: `-sum_e p_e ln p_e / ln E`, where `p` are the shares.

    1 is even, 0 is a single expert. A layer without any token gives 0. `load` is `[L, E]`.
    """
    total = load.sum(-1, keepdims=True)
    share = load / np.maximum(total, 1)
    terms = np.where(share > 0, share * np.log(np.where(share > 0, share, 1.0)), 0.0)
    entropy: np.ndarray = -terms.sum(-1) / np.log(max(load.shape[-1], 2))
    return entropy


def load_imbalance(load: np.ndarray) -> np.ndarray:
    """`[L]` largest load over the mean load: 1 is even, `E` a single expert. A layer without any token gives 0."""
    mean = load.mean(-1)
    imbalance: np.ndarray = np.where(mean > 0, load.max(-1) / np.where(mean > 0, mean, 1.0), 0.0)
    return imbalance
