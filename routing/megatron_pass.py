"""One forward of one Megatron model chunk: what its routers select, and the count of what its dispatchers did.

Shape letters: N local tokens in router order, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from routing.errors import ReplayProofError
from routing.proof import differs
from routing.replay import Record, Recorded, ReplayRecorded, ReplayRecords, RouteSource

DUE, ROUTED, MATCHED, FLIPPED = range(4)
TopK = Callable[..., tuple[Tensor, Tensor]]


class ReplayPass:
    """One forward of one model chunk under one route source, and the recomputation of it in backward."""

    def __init__(self, source: RouteSource, layer_ids: Sequence[int], num_local: int, counters: Tensor) -> None:
        self.replays = isinstance(source, ReplayRecords | ReplayRecorded)
        self.records = isinstance(source, Record)
        self.layer_ids = tuple(layer_ids)
        self.num_local = num_local
        self.counters = counters
        self.targets: Mapping[int, Tensor] = {}
        self.expected: Mapping[int, Tensor] = {}
        self.due = torch.zeros(0, dtype=torch.bool)
        self.digest = b""
        self.proved = dict.fromkeys(self.layer_ids, 0)
        self._taken: dict[int, Tensor] = {}

    def recorded(self) -> Recorded:
        """The routes this pass used. Raises `ReplayProofError` unless the source was `Record()` and every layer was forwarded."""
        missing = [layer for layer in self.layer_ids if layer not in self._taken]
        if not self.records or missing:
            raise ReplayProofError(
                f"no routes were recorded: source is {'Record()' if self.records else 'not Record()'}, layers missing {missing}"
            )
        # Tensors of inference mode cannot be saved for a later backward; a clone made outside of it can.
        return Recorded(
            {layer: taken.clone() if taken.is_inference() else taken for layer, taken in self._taken.items()},
            self.digest,
        )

    def select(
        self,
        layer: int,
        scores: Tensor,
        top_k: int,
        live_top_k: Callable[[Tensor], tuple[Tensor, Tensor]],
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        """Scores `[N, E]` to the scores and ids `[N, K]` this pass uses in `layer`."""
        if scores.shape[0] != self.num_local:
            raise ReplayProofError(
                f"layer {layer}: the router sees {scores.shape[0]} tokens, the layout says {self.num_local}"
            )
        if self.replays:
            targets = self.targets[layer]
            if targets.shape[1] != top_k:
                raise ReplayProofError(
                    f"layer {layer}: {targets.shape[1]} recorded experts per token, the router wants {top_k}"
                )
            with torch.no_grad():
                flipped = differs(live_top_k(scores.detach())[1], targets) & self.due
                self.counters[layer, FLIPPED] += flipped.sum()
                self.counters[layer, ROUTED] += self.due.sum()
            return scores.gather(1, targets), targets
        if self.records and recompute:
            return scores.gather(1, self._taken[layer]), self._taken[layer]
        values, experts = live_top_k(scores)
        if self.records:
            self._taken[layer] = experts
        return values, experts

    def prove(self, layer: int, matches: Callable[[Tensor], Tensor], recompute: bool) -> None:
        """Count the due tokens of `layer` whose dispatched experts are the expected ones; `matches` maps `[N, K]` ids to `[N]` bool."""
        if not recompute:
            self.proved[layer] += 1
        if self.replays:
            with torch.no_grad():
                self.counters[layer, MATCHED] += (matches(self.expected[layer]) & self.due).sum()
                if recompute:
                    self.counters[layer, DUE] += self.due.sum()


class RouterTap:
    """What sits at `router.router_replay` of one MoE layer: hands Megatron's question to the pass that is running."""

    def __init__(self, layer: int, running: Callable[[], tuple[ReplayPass, bool]]) -> None:
        self.layer, self.running = layer, running

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Megatron's entry point (0.16 and later); the name and the arguments are Megatron's."""
        if default_compute_topk is None:
            raise ReplayProofError("this Megatron-Core does not hand over its own top-k; use 0.16.1 or later")
        running, recompute = self.running()
        return running.select(
            self.layer, scores, topk, lambda live: default_compute_topk(live, topk, num_groups, group_topk), recompute
        )
