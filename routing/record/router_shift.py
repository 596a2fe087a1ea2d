"""Scores that routers give the experts in use: kept in one pass, and compared with in another.

The score of expert e is the router's softmax probability of it among all experts, or its sigmoid. The shift of a token
is the mean over layers and chosen experts of |log r_now(e) - log r_kept(e)|. Both passes must use the same experts, and
so replay them. Nothing here has a gradient.

Shape letters: N local tokens in router order, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from routing.errors import RouteError


@dataclass(frozen=True)
class RouterScores:
    """Log-scores of the experts that one pass used, on this rank.

    Attributes:
        logs: layer id -> `[N, K]` float32, in the order of the pass. Empty: a source with this asks for them.
    """

    logs: Mapping[int, Tensor] = field(default_factory=dict)


KEEP = RouterScores()
"""For a source whose pass keeps its scores."""


class RouterWatch:
    """The scores that one pass keeps or compares.

    Args:
        against: scores to compare with, or `KEEP`.
    """

    def __init__(self, against: RouterScores) -> None:
        self._against, self._kept = against.logs, dict[int, Tensor]()
        self._sum: Tensor | None = None
        self._layers = 0

    @property
    def compares(self) -> bool:
        """True where the pass is compared, False where its scores are kept."""
        return bool(self._against)

    @torch.no_grad()
    def see(self, layer: int, logits: Tensor, used: Tensor, *, sigmoid: bool) -> None:
        """The router's logits `[N, E]` of `layer`, and the ids `[N, K]` that the experts get.

        Raises `RouteError` (`layers`, `shape`) where the scores to compare with are of another pass.
        """
        logits = logits.detach().float()
        logs = (F.logsigmoid(logits) if sigmoid else logits.log_softmax(-1)).gather(1, used)
        if not self.compares:
            self._kept[layer] = logs
            return
        kept = self._against.get(layer)
        if kept is None or kept.shape != logs.shape:
            raise RouteError(
                "layers" if kept is None else "shape",
                "router scores to compare with are of another pass",
                where=f"layer {layer}",
                got=None if kept is None else tuple(kept.shape),
                expected=tuple(logs.shape),
            )
        moved = (logs - kept).abs().mean(1)
        self._sum = moved if self._sum is None else self._sum + moved
        self._layers += 1

    def scores(self) -> RouterScores | None:
        """The scores that were kept; None where the pass was compared."""
        # Tensors of inference mode cannot be used with a later backward; a clone made outside of it can.
        return None if self.compares else RouterScores({layer: logs.clone() for layer, logs in self._kept.items()})

    def shift(self) -> Tensor | None:
        """`[N]` float32 shift of each token; None where nothing was compared."""
        return None if self._sum is None else self._sum / self._layers
