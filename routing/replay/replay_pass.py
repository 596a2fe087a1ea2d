"""One forward of one model under one route source, for any engine: the routers' selection, and the count of its use.

Shape letters: N local tokens in router order, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from routing.errors import ReplayProofError, RouteError
from routing.indexer.one_pass import IndexerPass
from routing.judge.flip_bound import FlipBoundError, fresh_fault, suspects, token_fault, worst
from routing.judge.flips import router_margin
from routing.judge.sample_flips import PassFlips, SampleFlips
from routing.layout.packed import AnyLayout
from routing.record.router_shift import RouterWatch
from routing.record.sources import Native, Record, Recorded, ReplayRecorded, ReplayRecords, ReplayReport, RouteSource
from routing.replay.gate_proof import check_gates
from routing.replay.proof import shared
from routing.replay.router_losses import RouterLosses

DUE, ROUTED, MATCHED, FLIPPED, NATIVE = range(5)
"""Columns of the counters `[layers, 5]`, in tokens.

- due: had to use a recorded route.
- got it at the router.
- used it in the experts.
- would have chosen otherwise.
- have a record without routes there, and were left to the live router.
"""


class Counters:
    """`[layers, 5]` int64 of each decoder layer, in two parts: what the device counts, and what the host knows."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.device = torch.zeros(num_layers, NATIVE + 1, dtype=torch.int64, device=device)
        self.host = [[0] * (NATIVE + 1) for _ in range(num_layers)]

    def __len__(self) -> int:
        return len(self.host)

    def count(self, layer: int, column: int, number: int) -> None:
        """Add `number` tokens that the host knows of."""
        self.host[layer][column] += number

    def take(self, beside: Tensor) -> Tensor:
        """Both parts together, on the CPU, with the columns `beside` `[layers, ...]` behind them. Reset by the call."""
        combined = torch.cat((self.device, beside), dim=1).cpu()
        combined[:, : NATIVE + 1] += torch.tensor(self.host)
        self.device.zero_()
        self.host = [[0] * (NATIVE + 1) for _ in self.host]
        return combined


class ReplayPass:
    """One forward under one route source, and the recomputation of it in backward.

    `losses`, where it is set before the forward: what the routers add to their gradient.
    """

    def __init__(self, source: RouteSource, layer_ids: Sequence[int], num_local: int, counters: Counters) -> None:
        self.replays = isinstance(source, ReplayRecords | ReplayRecorded)
        self.records = isinstance(source, Record)
        self.layer_ids = tuple(layer_ids)
        self.num_local = num_local
        self.counters = counters
        self.targets: Mapping[int, Tensor] = {}
        self.expected: Mapping[int, Tensor] = {}
        self.digest = b""
        self.layout: AnyLayout | None = None
        self.proved = dict.fromkeys(self.layer_ids, 0)
        self._due = torch.zeros(0, dtype=torch.bool)
        self._num_due = 0
        self._live: Tensor | None = None
        self._num_free = 0
        self._taken: dict[int, Tensor] = {}
        self._margins: dict[int, Tensor] = {}
        self._flips: dict[int, Tensor] = {}
        self._by_sample: PassFlips | None = None
        self.indexer = IndexerPass()
        scores = None if isinstance(source, Native) else source.scores
        self.watch = None if scores is None else RouterWatch(scores)
        self.losses: RouterLosses | None = None

    def expect(
        self,
        due_N: Tensor,
        free: Tensor | None,
        device: torch.device,
        by_sample: PassFlips | None = None,
        *,
        rest_is_live: bool = False,
    ) -> None:
        """Local tokens that must use recorded routes, and real ones (`free`) that have none and keep the live router's.

        Both are `[N]` bool on the CPU. `by_sample` takes the flips of each sample. With `rest_is_live`, tokens that are
        neither (padding) keep the live router's choice too and are not counted; else they get what `targets` has.
        """
        self._by_sample = by_sample
        # Counted here, on the host and once: the layers then add numbers instead of reducing tensors.
        self._num_due = int(due_N.count_nonzero())
        self._due = due_N.to(device, non_blocking=True)
        if free is not None and bool(free.any()):
            self._num_free = int(free.sum())
        live = ~due_N if rest_is_live else free
        if live is not None and bool(live.any()):
            self._live = live[:, None].to(device, non_blocking=True)
        for layer in self.layer_ids:
            self.counters.count(layer, DUE, self._num_due)

    @property
    def due(self) -> Tensor:
        """`[N]` bool: local tokens that must use recorded routes."""
        return self._due

    def used(self, layer: int) -> Tensor:
        """`[N, K]` ids that the experts of `layer` get, once its router has run."""
        return self._taken[layer] if self.records else self.expected[layer]

    def check_recorded(self, recorded: Recorded, top_k: int) -> None:
        """Raise `RouteError` (`digest`, `layers`, `shape`) unless an earlier pass recorded this micro-batch.

        The cut must be the same, with `top_k` experts.
        """
        if recorded.batch_digest != self.digest:
            raise RouteError(
                "digest",
                "recorded routes belong to another micro-batch",
                got=recorded.batch_digest.hex() or None,
                expected=self.digest.hex(),
            )
        for layer in self.layer_ids:
            shape = tuple(recorded.experts[layer].shape) if layer in recorded.experts else None
            if shape != (self.num_local, top_k):
                raise RouteError(
                    "layers" if shape is None else "shape",
                    "recorded routes do not fit",
                    where=f"layer {layer}",
                    got=shape,
                    expected=(self.num_local, top_k),
                )

    def recorded(self) -> Recorded:
        """The routes this pass used.

        Raises `ReplayProofError` unless the source was `Record()` and every layer was forwarded.
        """
        missing = [layer for layer in self.layer_ids if layer not in self._taken]
        if not self.records or missing:
            raise ReplayProofError(
                f"no routes were recorded: source is {'Record()' if self.records else 'not Record()'}, layers missing "
                f"{missing}"
            )
        # Tensors of inference mode cannot be saved for a later backward; a clone made outside of it can.
        taken, positions = (
            {layer: ids.clone() if ids.is_inference() else ids for layer, ids in kept.items()}
            for kept in (self._taken, self.indexer.kept)
        )
        return Recorded(taken, self.digest, self.layout, self._margins, positions)

    @torch.no_grad()
    def keep_margin(self, layer: int, scores: Tensor, top_k: int) -> None:
        """Keep the margin by which the router of `layer` chose.

        `scores` `[N, E]` are those whose best `top_k` it takes.
        """
        if self.records and layer not in self._margins and top_k < scores.shape[-1]:
            self._margins[layer] = router_margin(scores.float(), top_k)

    def choose(self, layer: int, live: Tensor, recompute: bool) -> Tensor:
        """The ids `[N, K]` that `layer` must use, given those its live router chose."""
        if live.shape[0] != self.num_local:
            raise ReplayProofError(
                f"layer {layer}: the router sees {live.shape[0]} tokens, the layout says {self.num_local}"
            )
        if self.records:
            return self._taken[layer] if recompute else self._taken.setdefault(layer, live)
        if not self.replays:
            return live
        targets = self.targets[layer]
        if targets.shape[1] != live.shape[1]:
            raise ReplayProofError(
                f"layer {layer}: {targets.shape[1]} recorded experts per token, the router wants {live.shape[1]}"
            )
        self.count(layer, live, targets, recompute)
        return targets if self._live is None else torch.where(self._live, live, targets)

    @torch.no_grad()
    def count(self, layer: int, live: Tensor, targets: Tensor, recompute: bool) -> None:
        """Count what the router of `layer` is given, `targets` `[N, K]`, and where its own choice `live` differs."""
        if not recompute:
            lost_N = (live.shape[1] - shared(live, targets)).int() * self._due
            marks_2N = torch.stack((lost_N.clamp(max=1), lost_N))
            self._flips[layer] = marks_2N[0].sum()
            if self._by_sample is not None:
                self._by_sample.count(layer, marks_2N)
        # Recomputation has the logits of the forward, and so its flips.
        self.counters.device[layer, FLIPPED] += self._flips[layer]
        self.counters.count(layer, ROUTED, self._num_due)
        self.counters.count(layer, NATIVE, self._num_free)

    @torch.no_grad()
    def prove(self, layer: int, matches: Callable[[Tensor], Tensor], recompute: bool) -> None:
        """Count the due tokens of `layer` whose used experts are the expected ones.

        `matches` maps `[N, K]` ids to `[N]` bool.
        """
        if not recompute:
            self.proved[layer] += 1
        if not self.replays:
            return
        self.counters.device[layer, MATCHED] += (matches(self.expected[layer]) & self._due).sum()
        if recompute:
            self.counters.count(layer, DUE, self._num_due)


def judge(
    counters: Tensor, max_local_flip_rate: float, by_sample: SampleFlips, top_k: int, num_experts: int
) -> ReplayReport:
    """The report of counters `[layers, 5]`, or `ReplayProofError` when they do not prove the step.

    Further columns are those of `GateProof.take`.

    Raises:
        MisalignedError: part of the tokens have routes that are not theirs (`routing.judge.token_agreement`), or
            samples flip beyond the bound at the weights that sampled them.
        FlipBoundError: every token used its recorded set, but too many of them are not the live router's: in a sample,
            in a layer or overall. With `max_local_flip_rate` 1 nothing is too many.
    """
    rows = counters.tolist()
    by_layer = {layer: row for layer, row in enumerate(rows) if row[DUE] or row[ROUTED]}
    for layer, row in by_layer.items():
        if not row[DUE] == row[ROUTED] == row[MATCHED]:
            raise ReplayProofError(
                f"layer {layer}: {row[DUE]} tokens had to use recorded routes, the router was given them for "
                f"{row[ROUTED]}, the dispatcher used exactly them for {row[MATCHED]}. The step must not be trained on."
            )
    check_gates(counters[:, NATIVE + 1 :])
    report = ReplayReport(
        replayed=sum(row[DUE] for row in by_layer.values()),
        matched=sum(row[MATCHED] for row in by_layer.values()),
        local_flips=sum(row[FLIPPED] for row in by_layer.values()),
        local_flips_by_layer={layer: row[FLIPPED] / row[DUE] for layer, row in by_layer.items() if row[DUE]},
        native=sum(row[NATIVE] for row in rows),
    )
    if max_local_flip_rate == 1.0:
        return report
    certain = fresh_fault(by_sample, max_local_flip_rate) or token_fault(by_sample, top_k, num_experts)
    # Rows that another pass judges say nothing here.
    due_L, flipped_L = by_sample.due.sum(0), by_sample.flipped.sum(0)
    rates = {layer: float(flipped_L[layer] / due_L[layer]) for layer in np.flatnonzero(due_L).tolist()}
    highest = max([float(flipped_L.sum() / max(due_L.sum(), 1)), *rates.values()])
    named_suspects = suspects(by_sample, top_k, num_experts)
    if highest > max_local_flip_rate:
        raise FlipBoundError(
            "replayed expert sets differ from the live router's own choice too often: worst rate of a layer "
            f"{highest:.3f}, max_local_flip_rate {max_local_flip_rate}; by layer {rates}",
            named_suspects or worst(by_sample, top_k, num_experts),
            report,
            alike=not named_suspects,
            certain=certain,
        )
    if named_suspects:
        raise FlipBoundError(
            "replayed expert sets of some samples differ from the live router's own choice far more often than those "
            f"of their batch ({report.local_flip_rate or 0.0:.2%} flip in all)",
            named_suspects,
            report,
            certain=certain,
        )
    if certain is not None:
        raise certain
    return report
