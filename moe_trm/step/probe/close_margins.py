"""Router margins against the noise between the engines: the share of tokens that rounding could send elsewhere.

The noise of a layer is not measured directly, since an engine gives no scores of its router. It shows in the flips: its
size is taken as the margin below which nine in ten of the layer's flips lie, over all probes of the run so far.

Shape letters: N scored tokens of this rank, L MoE layers of the model, C classes of margin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_trm.learner.protocol import Learner

EDGES = 10.0 ** torch.arange(-6, 0.5, 0.25, dtype=torch.float64)
"""Upper ends of the classes of margin, in the router's scores; the last class has none."""
MOST = 0.9
"""Share of the flips whose margins the noise covers."""
LEAST = 10
"""Flips of a layer from which its noise is known."""


class CloseMargins:
    """`routing/close/layer_<id>` of each probe, and `routing/close` over the layers that have one."""

    def __init__(self) -> None:
        self._flips_LC: Tensor | None = None

    def run(self, learner: Learner, flips_NL: Tensor, margins_NL: Tensor) -> dict[str, float]:
        """Shares of tokens; empty for layers with fewer than `LEAST` flips so far, or without margins. Collective."""
        layers, classes = learner.model_moe_layer_ids, len(EDGES) + 1
        known_NL = ~margins_NL.isnan()
        place_NL = torch.bucketize(margins_NL.nan_to_num().double(), EDGES) + classes * torch.arange(len(layers))
        counts = [
            torch.bincount(place_NL[part], minlength=classes * len(layers)) for part in (known_NL, known_NL & flips_NL)
        ]
        sums = learner.reduce(
            {f"{name}/{n}": v for name, part in zip(("all", "flips"), counts, strict=True) for n, v in enumerate(part)}
        )
        all_LC, flips_LC = (
            torch.tensor([sums[f"{name}/{n}"] for n in range(classes * len(layers))]).view(len(layers), classes)
            for name in ("all", "flips")
        )
        self._flips_LC = flips_LC if self._flips_LC is None else self._flips_LC + flips_LC
        shares = {}
        for place, layer in enumerate(layers):
            flips_C, all_C = self._flips_LC[place], all_LC[place]
            if flips_C.sum() >= LEAST and all_C.sum():
                within = flips_C.cumsum(0) >= MOST * flips_C.sum()
                shares[f"routing/close/layer_{layer}"] = float(
                    all_C[: int(within.int().argmax()) + 1].sum() / all_C.sum()
                )
        return {"routing/close": sum(shares.values()) / len(shares), **shares} if shares else {}

    def state(self) -> list[list[float]]:
        """The flips so far as plain data."""
        return [] if self._flips_LC is None else self._flips_LC.tolist()

    def restore(self, state: Any) -> None:
        """Go on after `state`."""
        self._flips_LC = torch.tensor(state) if state else None
