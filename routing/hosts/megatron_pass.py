"""Replay objects attached to a Megatron-Core router.

Shape letters: N local tokens in router order, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from routing.errors import ReplayProofError
from routing.replay.replay_pass import ReplayPass

TopK = Callable[..., tuple[Tensor, Tensor]]


class RouterTap:
    """Object at `router.router_replay` of one MoE layer: passes Megatron's call to the running pass."""

    def __init__(
        self,
        layer: int,
        running: Callable[[], tuple[ReplayPass, bool]],
        *,
        logits: bool,
        answered: Callable[[Tensor], None],
    ) -> None:
        self.layer, self.running, self._answered = layer, running, answered
        self._logits = logits
        """True when the router takes the top-k of its logits, not of scores made from them."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Megatron's entry point (0.16 and later); the name and the arguments are Megatron's.

        Scores `[N, E]` to the scores and ids `[N, K]` that this pass uses.
        """
        if default_compute_topk is None:
            raise ReplayProofError("this Megatron-Core does not hand over its own top-k; use 0.16.1 or later")
        running, recompute = self.running()
        if not running.replays and not (running.records and recompute):
            values, live = default_compute_topk(scores, topk, num_groups, group_topk)
            if running.records and group_topk is None:
                running.keep_margin(self.layer, scores.softmax(-1) if self._logits else scores, topk)
            running.choose(self.layer, live, recompute)
            return values, live
        with torch.no_grad():
            live = default_compute_topk(scores.detach(), topk, num_groups, group_topk)[1]
        ids = running.choose(self.layer, live, recompute)
        if running.losses is not None and scores.requires_grad:
            scores.register_hook(self._answered)  # type: ignore[no-untyped-call]
        return scores.gather(1, ids), ids
