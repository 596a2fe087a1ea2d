"""Flips: token-layers whose sets of experts differ between two sets of routes.

The order of experts within a row is ignored.

By cause, the same comparison with other sides:

- *local*: the replayed set against the same logits' own top-k, counted on every replayed forward
  (`ReplayReport.local_flips_by_layer`).
- *engine*: the learner's routes against the rollout's at the same weights.
- *staleness*: one engine's routes at two versions of the weights.

Shape letters: T rows, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from routing.errors import RouteError
from routing.record.record import RouteRecord
from routing.record.sources import Recorded, layer_columns


@dataclass(frozen=True)
class Flips:
    """Differences between two sets of routes, over the rows that count.

    With `flip[t, l] = 1` where the two expert sets of row `t` in layer `l` are not the same:

    Attributes:
        num_token_layers: how many `(t, l)` were compared; with none, every rate is 0.
        token_layer_rate: mean of `flip` over `(t, l)`.
        token_any_layer_rate: share of rows with a flip in at least one layer.
        overlap_loss: mean of `1 - |a & b| / K`.
        expert_delta: mean over experts of the chance that one side uses the expert and the other does not, `2 K
            overlap_loss / E`.
        per_layer: `[L]` float64, mean of `flip` in each layer.
        per_expert: `[E]` float64, that chance for each expert.
    """

    num_token_layers: int
    token_layer_rate: float
    token_any_layer_rate: float
    overlap_loss: float
    expert_delta: float
    per_layer: np.ndarray
    per_expert: np.ndarray


def flips(
    a: RouteRecord | np.ndarray | Tensor,
    b: RouteRecord | np.ndarray | Tensor,
    mask: np.ndarray | Tensor | None = None,
    *,
    num_experts: int | None = None,
) -> Flips:
    """Compare routes `[..., L, K]` of the same tokens.

    Args:
        a: a record, or an integer array with distinct ids in the last dimension.
        b: another, of the same shape.
        mask: bool, `[...]` or `[..., L]`; False leaves a row (or one of its layers) out.
        num_experts: `E`; taken from the records, or one more than the largest id when both are arrays.

    Raises:
        RouteError: `shape` or `layers` when the two do not describe the same tokens and layers; `range` for ids outside
            `0..E-1`.

    Source: flip rates as in the R3 report (Rollout Routing Replay); overlap and per-expert change follow from the set
    difference.
    """
    a_TLK, right = _ids(a), _ids(b)
    if a_TLK.shape != right.shape or a_TLK.ndim < 2:
        raise RouteError("shape", "routes to compare have different shapes", got=a_TLK.shape, expected=right.shape)
    if (
        isinstance(a, RouteRecord)
        and isinstance(b, RouteRecord)
        and (a.layer_ids, a.num_experts) != (b.layer_ids, b.num_experts)
    ):
        raise RouteError(
            "layers",
            "routes to compare are of different models",
            got=(a.layer_ids, a.num_experts),
            expected=(b.layer_ids, b.num_experts),
        )
    layers, top_k = a_TLK.shape[-2:]
    a_TLK, right = a_TLK.reshape(-1, layers, top_k), right.reshape(-1, layers, top_k)
    counted_TL = _counted(mask, tuple(_ids(a).shape[:-2]), layers)
    experts = _num_experts(a, b, a_TLK, right, counted_TL, num_experts)
    same_TLK = (a_TLK[..., :, None] == right[..., None, :]).any(-1)
    lost_TL = np.where(counted_TL, top_k - same_TLK.sum(-1), 0)
    flipped_TL = lost_TL > 0
    total, rows = int(counted_TL.sum()), counted_TL.any(1)
    only_left = a_TLK[counted_TL & flipped_TL][~same_TLK[counted_TL & flipped_TL]]
    same_from_right = (right[..., :, None] == a_TLK[..., None, :]).any(-1)
    only_right = right[counted_TL & flipped_TL][~same_from_right[counted_TL & flipped_TL]]
    changed_E = np.bincount(np.concatenate([only_left, only_right]).astype(np.int64), minlength=experts)
    per_expert = changed_E / max(total, 1)
    return Flips(
        num_token_layers=total,
        token_layer_rate=float(flipped_TL.sum() / max(total, 1)),
        token_any_layer_rate=float(flipped_TL[rows].any(1).mean()) if rows.any() else 0.0,
        overlap_loss=float(lost_TL.sum() / max(total * top_k, 1)),
        expert_delta=float(per_expert.mean()),
        per_layer=flipped_TL.sum(0) / np.maximum(counted_TL.sum(0), 1),
        per_expert=per_expert,
    )


def flipped_tokens(recorded: Recorded, records: Sequence[RouteRecord | None], length: int) -> Tensor:
    """Mask of the token-layers whose own routes differ from the rollout's: `[B, R, L]` bool on the CPU.

    Layers are in the order of `recorded.experts`.

    False on padding, on rows without recorded routes, and on tokens of other ranks. The maximum over the context and
    sequence parallel group is the whole micro-batch.

    Args:
        recorded: of this rank.
        records: one per row.
        length: R, columns of the micro-batch.

    Raises:
        RouteError: `rows`, `layers` or `shape` when records and pass do not fit.
    """
    layers = tuple(recorded.experts)
    flipped_BRL = torch.zeros(len(records), length, len(layers), dtype=torch.bool)
    if not layers:
        return flipped_BRL
    used_BRLK = torch.stack([recorded.by_row(layer, len(records), length).cpu() for layer in layers], dim=2)
    for row, record in enumerate(records):
        if record is None:
            continue
        columns = layer_columns(record, layers, record.num_experts, used_BRLK.shape[-1])
        used_TLK = used_BRLK[row, : record.num_rows]
        if len(used_TLK) != record.num_rows:
            raise RouteError(
                "rows",
                "a record is longer than the micro-batch",
                where=f"row {row}",
                got=record.num_rows,
                expected=f"at most {len(used_TLK)}",
            )
        theirs_TLK = torch.from_numpy(record.experts[:, columns].astype(np.int64))
        covered_TL = torch.from_numpy(record.coverage())[:, None]
        flipped_BRL[row, : record.num_rows] = sets_differ(used_TLK, theirs_TLK) & covered_TL
    return flipped_BRL


def sets_differ(a: Tensor, b: Tensor) -> Tensor:
    """`[...]` bool, whether two expert sets `[..., K]` are not the same; False where either was not recorded (-1)."""
    same = (a[..., :, None] == b[..., None, :]).any(-1).all(-1)
    return ~same & (a >= 0).all(-1) & (b >= 0).all(-1)


def router_margin(scores: Tensor, top_k: int) -> Tensor:
    """`[..., ]` gap between the last chosen and the first rejected score of `[..., E]`: small gaps flip first.

    Needs `top_k < E`.
    """
    best = scores.topk(top_k + 1, dim=-1)[0]
    return best[..., top_k - 1] - best[..., top_k]


def gate_weight_shift(ids_a: Tensor, weights_a: Tensor, ids_b: Tensor, weights_b: Tensor) -> Tensor:
    """`[N]` mean of `|w_a(e) - w_b(e)|` over the experts that both sides chose; NaN where they share none.

    Inputs are `[N, K]`.
    """
    common = ids_a[:, :, None] == ids_b[:, None, :]
    distance = (weights_a[:, :, None] - weights_b[:, None, :]).abs() * common
    return distance.sum((1, 2)) / common.sum((1, 2))


def _ids(routes: RouteRecord | np.ndarray | Tensor) -> np.ndarray:
    if isinstance(routes, RouteRecord):
        return routes.experts
    return routes.detach().cpu().numpy() if isinstance(routes, Tensor) else np.asarray(routes)


def _counted(mask: np.ndarray | Tensor | None, rows: tuple[int, ...], layers: int) -> np.ndarray:
    if mask is None:
        return np.ones((int(np.prod(rows)), layers), dtype=bool)
    mask_array = mask.detach().cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask)
    if mask_array.dtype != bool or mask_array.shape not in (rows, (*rows, layers)):
        raise RouteError(
            "shape",
            "mask does not fit the routes",
            got=f"{mask_array.dtype} {mask_array.shape}",
            expected=f"bool {rows} or {(*rows, layers)}",
        )
    by_layer = mask_array[..., None] if mask_array.shape == rows else mask_array
    return np.array(np.broadcast_to(by_layer, (*rows, layers))).reshape(-1, layers)


def _num_experts(
    a: object, b: object, a_TLK: np.ndarray, right: np.ndarray, counted_TL: np.ndarray, num_experts: int | None
) -> int:
    declared = num_experts or next((r.num_experts for r in (a, b) if isinstance(r, RouteRecord)), None)
    used = np.concatenate([a_TLK[counted_TL].ravel(), right[counted_TL].ravel()]).astype(np.int64)
    largest = int(used.max(initial=0))
    if used.min(initial=0) < 0 or (declared is not None and largest >= declared):
        raise RouteError(
            "range",
            "expert id out of range",
            got=f"{int(used.min(initial=0))}..{largest}",
            expected=f"0..{(declared or largest + 1) - 1}",
            fix="Mask rows that were not recorded.",
        )
    return declared or largest + 1
