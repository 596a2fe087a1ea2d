"""Flips by cause.

Three sets of routes are compared: the rollout's, the learner's at the weights that sampled, and the learner's now.
engine: rollout against learner, both at the weights that sampled. staleness: the learner at those weights against the
learner now. (The third cause, local, is counted on every replayed forward: `routing/local_flip_rate`.)

Shape letters: B rows, R forwarded tokens, L MoE layers of this rank, K experts per token, P classes of position, M
classes of router margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from moe_trm.learner.protocol import Learner, Scores
from moe_trm.types import TokenBatch
from routing.judge.flips import flipped_tokens, sets_differ

POSITIONS = (64, 256, 1024, 4096, 16384)
"""Upper ends of the classes of position; fixed, so that steps may be compared."""
MARGINS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
"""Lower ends of the classes of router margin, without the first.

The unit is the router's scores, by which it chooses: probabilities, or sigmoids with their bias.
"""


def flips_of(scores: Scores, batch: TokenBatch, layers: Sequence[int]) -> Tensor:
    """`[B, R, L]` bool on the CPU: where the routes of a `Record` pass differ from the rollout's in `layers`."""
    assert scores.recorded is not None
    experts = scores.recorded.experts
    local = replace(scores.recorded, experts={layer: experts[layer] for layer in layers})
    return flipped_tokens(local, batch.routes, batch.mask.shape[1])


def flip_causes(
    learner: Learner,
    batches: Sequence[TokenBatch],
    native: Sequence[Scores],
    older: Mapping[int, Sequence[Scores]],
    flipped: Sequence[Tensor],
) -> dict[str, float]:
    """Collective: all ranks call it with their own batches of one step and the same versions.

    Args:
        learner: reduces over the ranks.
        batches: with the rollout's routes and the version that sampled each token.
        native: what scoring the batches with `Record()` gave under the learner's weights.
        older: the same under each older version that sampled and is still held.
        flipped: `flips_of` each of `native` in `learner.moe_layer_ids`.

    Returns:
        `routing/flips/engine`, `routing/flips/engine/layer_<id>`, `routing/flips/engine/position_<low>_<high>` and
            `routing/flips/engine/margin_<low>_<high>`
        (how nearly the learner's router chose otherwise; none for routers that choose groups first): shares of scored
            token-layers;
        with `older`, `routing/flips/staleness` and `routing/flips/staleness/layer_<id>`, shares of those that an older
            version sampled.
    """
    local_layers, layer_ids = learner.moe_layer_ids, learner.model_moe_layer_ids
    places = [layer_ids.index(layer) for layer in local_layers]
    engine_L, stale_L = torch.zeros(len(layer_ids)).double(), torch.zeros(len(layer_ids)).double()
    engine_P, tokens_P = torch.zeros(len(POSITIONS) + 1).double(), torch.zeros(len(POSITIONS) + 1).double()
    engine_M, counted_M = torch.zeros(len(MARGINS) + 1).double(), torch.zeros(len(MARGINS) + 1).double()
    stale_tokens = 0
    for index, (batch, scores) in enumerate(zip(batches, native, strict=True)):
        engine_BRL, margin_BRL = flipped[index], margins_of(scores, batch, local_layers)
        mask = batch.mask.cpu()
        if older:
            now_BRLK = _chosen(scores, batch, local_layers)
            then_BRLK, stale_BR = now_BRLK, torch.zeros_like(mask)
            for version, passes in older.items():
                sampled_BR = (batch.mask & (batch.versions == version)).cpu()
                then_BRLK = torch.where(
                    sampled_BR[..., None, None], _chosen(passes[index], batch, local_layers), then_BRLK
                )
                engine_BRL = torch.where(
                    sampled_BR[..., None], flips_of(passes[index], batch, local_layers), engine_BRL
                )
                margin_BRL = torch.where(
                    sampled_BR[..., None], margins_of(passes[index], batch, local_layers), margin_BRL
                )
                stale_BR |= sampled_BR
            stale_L[places] += sets_differ(then_BRLK, now_BRLK)[stale_BR].sum(0)
            stale_tokens += int(stale_BR.sum())
        engine_NL, margin_NL = engine_BRL[mask], margin_BRL[mask]
        engine_L[places] += engine_NL.sum(0)
        class_N = torch.bucketize(mask.nonzero()[:, 1] + 1, torch.tensor(POSITIONS))
        engine_P.index_add_(0, class_N, engine_NL.sum(1).double())
        tokens_P += torch.bincount(class_N, minlength=len(tokens_P))
        known_NL = ~margin_NL.isnan()
        margin_class = torch.bucketize(margin_NL[known_NL], torch.tensor(MARGINS), right=True)
        engine_M.index_add_(0, margin_class, engine_NL[known_NL].double())
        counted_M += torch.bincount(margin_class, minlength=len(counted_M))
    own_sums = {"engine": engine_L, "stale": stale_L, "position": engine_P, "margin": engine_M, "counted": counted_M}
    summed = learner.sum_over_stages(learner.sum_over_slices(torch.cat(list(own_sums.values()))))
    sums = dict(zip(own_sums, torch.split(summed, [len(part) for part in own_sums.values()]), strict=True))
    sums |= {"tokens": tokens_P, "stale_tokens": torch.tensor([float(stale_tokens)])}
    reduced = learner.reduce(
        {f"{name}/{place}": value for name, values in sums.items() for place, value in enumerate(values)}
    )
    total = {name: [reduced[f"{name}/{place}"] for place in range(len(values))] for name, values in sums.items()}
    metrics = _rates("engine", total["engine"], sum(total["tokens"]), layer_ids)
    if older:
        metrics |= _rates("staleness", total["stale"], total["stale_tokens"][0], layer_ids)
    low = 1
    for place, high in enumerate([*POSITIONS, None]):
        if count := total["tokens"][place] * len(layer_ids):
            metrics[f"routing/flips/engine/position_{low}_{high or 'up'}"] = total["position"][place] / count
        low = (high or 0) + 1
    for place, (least, most) in enumerate(pairwise([0, *MARGINS, "up"])):
        if count := total["counted"][place]:
            metrics[f"routing/flips/engine/margin_{least}_{most}"] = total["margin"][place] / count
    return metrics


def _chosen(scores: Scores, batch: TokenBatch, layers: Sequence[int]) -> Tensor:
    """`[B, R, L, K]` ids on the CPU, -1 where another rank has them."""
    assert scores.recorded is not None
    if not layers:
        return torch.zeros(*batch.mask.shape, 0, 1, dtype=torch.int64)
    return torch.stack([scores.recorded.by_row(layer, *batch.mask.shape).cpu() for layer in layers], 2)


def margins_of(scores: Scores, batch: TokenBatch, layers: Sequence[int]) -> Tensor:
    """`[B, R, L]` router margins on the CPU, NaN where there is none or another rank has it."""
    assert scores.recorded is not None
    margins = torch.full((*batch.mask.shape, len(layers)), float("nan"))
    for place, layer in enumerate(layers):
        if (row_margins := scores.recorded.margins_by_row(layer, *batch.mask.shape)) is not None:
            margins[..., place] = row_margins.cpu()
    return margins


def _rates(cause: str, flips: Sequence[float], tokens: float, layer_ids: Sequence[int]) -> dict[str, float]:
    """Over all layers and by layer; nothing where no token counts."""
    if not tokens:
        return {}
    by_layer = {f"routing/flips/{cause}/layer_{layer}": n / tokens for layer, n in zip(layer_ids, flips, strict=True)}
    return {f"routing/flips/{cause}": sum(flips) / (tokens * len(layer_ids)), **by_layer}
