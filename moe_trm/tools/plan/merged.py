"""Memory of weights merged with adapters while they are needed (`moe_trm/learner/lora/adapter.py`).

A pass computes with W' = W + (alpha / rank) B A, a weight of its own for each parameter with adapters. Backward needs
it once more, for the gradient of what it multiplied. So it stays from a micro-batch's forward to its backward, unless
the layer is computed again there.

Letters: d bytes of a number of `learner.dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moe_trm.config.schema import LearnerConfig
from moe_trm.tools.plan.kept import BYTES
from moe_trm.tools.plan.parameters import Adapted, Kind, Part

FEED_FORWARD: frozenset[Kind] = frozenset(("dense", "router", "experts", "shared experts"))
"""Kinds whose layers `learner.recompute=selective` computes again."""


class MergedBytes(NamedTuple):
    """Bytes of a micro-batch that are `kept` until its backward, and a layer's while it is at `work`."""

    kept: float
    work: float


def merged_bytes(
    layers: Sequence[Adapted], learner: LearnerConfig, held: Callable[[Part], int], *, stacked: bool = False
) -> MergedBytes:
    """Merged weights of these layers.

    Kept: d for each element, and A and B once more in float32 where they are not. At work: a layer's weights that are
    computed again, and one parameter on its way: matrices of B A, packed, scaled, added, 4 bytes each; W and the sum in
    float32 where they are not.

    Args:
        layers: adapters of the rank's layers.
        learner: dtype and `recompute`.
        held: elements of a part on this rank.
        stacked: the experts of a layer are one parameter, as transformers has them.
    """
    size, kept, work = BYTES[learner.dtype], 0.0, 0.0
    forming = 16 if size == 4 else 20 + size
    for layer in layers:
        again = {"none": frozenset[Kind](), "selective": FEED_FORWARD, "full": layer.kinds}[learner.recompute]
        held_elements = {merged: held(merged.part) for merged in layer.merged}
        kept += size * sum(elements for merged, elements in held_elements.items() if merged.part.kind not in again)
        if size != 4:
            kept += 4 * sum(held(part) for part in layer.factors if part.kind not in again)
        parameter_elements = [
            elements if stacked else elements / max(1.0, merged.number * elements / merged.part.elements)
            for merged, elements in held_elements.items()
        ]
        recomputed = size * sum(elements for merged, elements in held_elements.items() if merged.part.kind in again)
        work = max(work, recomputed + forming * max(parameter_elements, default=0.0))
    return MergedBytes(kept, work)
