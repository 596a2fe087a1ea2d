"""Replay for every engine: the source of a forward pass's routes, and the proof that they were used.

Replay replaces the *selection* of experts and nothing else. With recorded ids `I` the gate weights are recomputed from
the live logits over `I`, so gradients reach the router. Order within a row is kept, so reductions are bitwise equal.

Shape letters: B sequences, R forwarded tokens of the longest, N local tokens in router order, L MoE layers, K experts
per token, E experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from torch import Tensor

from routing.errors import RouteError
from routing.indexer.proof import IndexerReport
from routing.layout.packed import AnyLayout
from routing.layout.rows import Rows
from routing.record.record import RouteRecord, check_ids, expert_dtype
from routing.record.router_shift import RouterScores


@dataclass(frozen=True)
class Recorded:
    """Routes one forward pass used on this rank.

    Attributes:
        experts: layer id -> `[N, K]` int64 expert ids, in router order where there is a layout, else row by row.
        batch_digest: `batch_digest` of the micro-batch they were recorded on; replay on any other is refused.
        layout: this rank's cut of that micro-batch; None: it was not cut.
        margins: layer id -> `[N]` float32 gap between the last chosen and the first rejected score
            (`routing.judge.flips.router_margin`), in the order of `experts`; layers whose routers choose within groups
            of experts, or choose all, have none.
        positions: layer id -> `[B, R, K]` positions that its indexer chose; empty of models without indexers.
    """

    experts: Mapping[int, Tensor]
    batch_digest: bytes = b""
    layout: AnyLayout | None = None
    margins: Mapping[int, Tensor] = field(default_factory=dict)
    positions: Mapping[int, Tensor] = field(default_factory=dict)

    def by_row(self, layer: int, batch: int, length: int) -> Tensor:
        """`[B, R, K]` ids of `layer`, -1 where another rank has them.

        Raises `RouteError` (`shape`) for another micro-batch.
        """
        return self._by_row(self.experts[layer], batch, length, fill=-1)

    def margins_by_row(self, layer: int, batch: int, length: int) -> Tensor | None:
        """`[B, R]` margins of `layer`, NaN where another rank has them; None for a layer without.

        Raises as `by_row` does.
        """
        if layer not in self.margins:
            return None
        return self._by_row(self.margins[layer][:, None], batch, length, fill=float("nan"))[..., 0]

    def _by_row(self, values: Tensor, batch: int, length: int, fill: float) -> Tensor:
        rows = (
            values.view(batch, -1, values.shape[-1]) if self.layout is None else self.layout.from_router(values, fill)
        )
        if rows.shape[0] != batch or rows.shape[1] < length:
            raise RouteError(
                "shape",
                "recorded routes are of another micro-batch",
                got=tuple(rows.shape[:2]),
                expected=(batch, length),
            )
        return rows[:, :length]

    def with_layers_of(self, chunk: Recorded) -> Recorded:
        """Also the layers that another chunk of the model recorded on the same micro-batch."""
        return replace(self, experts={**self.experts, **chunk.experts}, margins={**self.margins, **chunk.margins})


@dataclass(frozen=True)
class Native:
    """The live router chooses."""


@dataclass(frozen=True)
class Record:
    """The live router chooses and its choice is kept (R2's recording pass, native probe).

    `scores`: see `ReplayRecords`.
    """

    scores: RouterScores | None = None


@dataclass(frozen=True)
class ReplayRecords:
    """R3: the rollout's routes, one record per row of the micro-batch, in order. Padding rows have None.

    Attributes:
        records: see above.
        origins: what each record is bound to besides its tokens (`routing.sample_origin`), None on padding rows. Empty
            where records are bound to their tokens alone.
        scores: those that the routers gave the same experts in an earlier pass, to compare with; `router_shift.KEEP`
            keeps those of this pass; None: neither.
        at_sampling: of each record, whether the pass has the weights that sampled its row. True: only rounding may
            explain flips. False: another pass of the step has them and judges the row, so this one does not. None, and
            empty for all: unknown, so the router may have moved.
        prompts: of each record, the rows at its beginning whose tokens all samples of its prompt share; empty: unknown.
    """

    records: tuple[RouteRecord | None, ...]
    origins: tuple[bytes | None, ...] = ()
    scores: RouterScores | None = None
    at_sampling: tuple[bool | None, ...] = ()
    prompts: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReplayRecorded:
    """R2: the routes an earlier pass of this learner recorded for the same micro-batch.

    `scores`: see `ReplayRecords`.
    """

    recorded: Recorded
    scores: RouterScores | None = None


RouteSource = Native | Record | ReplayRecords | ReplayRecorded


@dataclass(frozen=True)
class ReplayReport:
    """Counters over all replayed forwards of a step, in token-layers without padding.

    Attributes:
        replayed: token-layers that had to use a recorded route.
        matched: of these, how many the dispatcher's own routing map matched exactly.
        local_flips: of these, how many the live router would have chosen differently.
        local_flips_by_layer: layer id -> local flip rate.
        native: token-layers without a recorded route that were left to the live router (`missing="native"`).
        moved: samples beyond the bound on flips whose rows and layers were found in place: the router has moved.
        indexer: of the positions of sparse attention; None where none were replayed.
    """

    replayed: int = 0
    matched: int = 0
    local_flips: int = 0
    local_flips_by_layer: Mapping[int, float] = field(default_factory=dict)
    native: int = 0
    moved: int = 0
    indexer: IndexerReport | None = None

    @property
    def applied_fraction(self) -> float | None:
        """`matched / replayed`: 1.0 on every proved step; None when nothing was replayed."""
        return self.matched / self.replayed if self.replayed else None

    @property
    def native_fraction(self) -> float:
        """Share of the token-layers of replayed passes without a recorded route, which were left to the live router."""
        return self.native / (self.native + self.replayed) if self.native else 0.0

    @property
    def local_flip_rate(self) -> float | None:
        """`local_flips / replayed`: about 0.02 for aligned routes of a bfloat16 rollout, 0.8 for rows shifted by one.

        None when nothing was replayed.
        """
        return self.local_flips / self.replayed if self.replayed else None

    def __add__(self, report: ReplayReport) -> ReplayReport:
        """Counters of both.

        Every MoE layer sees the same tokens, so a layer's rates are weighted by the reports' totals.
        """
        replayed = self.replayed + report.replayed
        flips = {
            layer: sum(r.replayed * r.local_flips_by_layer.get(layer, 0.0) for r in (self, report)) / replayed
            for layer in {**self.local_flips_by_layer, **report.local_flips_by_layer}
        }
        return ReplayReport(
            replayed,
            self.matched + report.matched,
            self.local_flips + report.local_flips,
            flips,
            self.native + report.native,
            self.moved + report.moved,
            self.indexer + report.indexer if self.indexer and report.indexer else self.indexer or report.indexer,
        )


def batch_digest(input_ids: Tensor, target_ids: Tensor, valid: Tensor) -> bytes:
    """16 bytes that identify a micro-batch (`[B, R]` tensors): shape, valid positions, and the tokens there."""
    hasher = hashlib.blake2b(repr(tuple(input_ids.shape)).encode(), digest_size=16)
    real = valid.cpu()
    for part in (real, input_ids.cpu()[real], target_ids.cpu()[real]):
        hasher.update(np.ascontiguousarray(part.numpy(), dtype="<i8").tobytes())
    return hasher.digest()


def row_lengths(valid: Tensor) -> list[int]:
    """Real tokens of each row of `valid` `[B, R]`. Raises `RouteError` (`rows`) unless they come first in their row."""
    return list(Rows.right_padded(valid).lengths)


def check_rows(
    records: Sequence[RouteRecord | None],
    rows: Rows,
    input_ids: Tensor,
    target_ids: Tensor | None,
    missing: Literal["reject", "native"] = "reject",
    origins: Sequence[bytes | None] = (),
) -> None:
    """Raise `RouteError` unless each sequence of `rows` is the one that its record was made for.

    The tokens of a sequence are its `input_ids` and then its last `target_ids`. Swapped samples, stale records and rows
    cut short all change the digest. Rows of padding alone, and only those, have no record.

    Args:
        records: one for each sequence.
        rows: where the sequences lie in the whole micro-batch, before any cut.
        input_ids: `[B, R]`.
        target_ids: `[B, R]`. None: the rows hold whole sequences, their last tokens too, and a sequence of T tokens
            needs routes of T - 1.
        missing: `reject` refuses records with rows that have no routes.
        origins: as in `ReplayRecords`.

    Raises:
        RouteError: `rows` (count, missing or superfluous record, rows without routes), `digest`.
    """
    rows.check_shape(input_ids)
    if len(records) != len(rows.spans):
        raise RouteError(
            "rows",
            "wrong number of route records for the micro-batch",
            got=len(records),
            expected=len(rows.spans),
        )
    if origins and len(origins) != len(records):
        raise RouteError("rows", "wrong number of origins for the records", got=len(origins), expected=len(records))
    has_last_token = target_ids is None
    inputs = targets = input_ids.cpu().numpy().astype("<i4").tobytes()
    if target_ids is not None:
        rows.check_shape(target_ids)
        targets = target_ids.cpu().numpy().astype("<i4").tobytes()
    for row, (record, (start, stop)) in enumerate(zip(records, rows.spans, strict=True)):
        length = max(stop - start - has_last_token, 0)
        if record is None or length == 0:
            if record is None and length == 0:
                continue
            raise RouteError(
                "rows",
                "route records and tokens disagree",
                where=f"row {row}",
                got="no record" if record is None else "a record",
                expected=f"routes of {length} tokens",
                fix="Only padding rows go without routes.",
            )
        if record.num_rows != length:
            raise RouteError(
                "rows", "wrong number of route rows", where=f"row {row}", got=record.num_rows, expected=length
            )
        if missing == "reject" and record.covered is not None and not record.covered.all():
            raise RouteError(
                "rows",
                "some tokens have no recorded routes",
                where=f"row {row}",
                got=f"{int(record.coverage().sum())} of {record.num_rows} rows",
                expected="routes of every row",
                fix=(
                    'Reject the sample, or attach the replayer with missing="native" to leave these tokens to the '
                    "live router."
                ),
            )
        ids = inputs[4 * start : 4 * (start + length)] + targets[4 * (stop - 1) : 4 * stop]
        try:
            check_ids(record, ids, (origins[row] or b"") if origins else b"")
        except RouteError as error:
            raise RouteError(
                error.reason,
                error.what,
                where=f"row {row} of the micro-batch",
                got=error.got,
                expected=error.expected,
                fix=error.fix,
            ) from error


def layer_columns(record: RouteRecord, layer_ids: Sequence[int], num_experts: int, top_k: int) -> list[int]:
    """Columns of `record.experts` that hold `layer_ids`. Raises `RouteError` when the record is of another model."""
    is_same = record.layer_ids == tuple(layer_ids)
    missing = [] if is_same else sorted(set(layer_ids) - set(record.layer_ids))
    if missing or len(record.layer_ids) != record.experts.shape[1]:
        raise RouteError(
            "layers",
            "the record lacks routes of some MoE layers",
            got=record.layer_ids,
            expected=f"also layers {missing}, one column each",
        )
    if (record.num_experts, record.top_k) != (num_experts, top_k):
        raise RouteError(
            "shape",
            "the record is of another model",
            got=f"{record.top_k} of {record.num_experts} experts",
            expected=f"{top_k} of {num_experts}",
        )
    if record.experts.dtype != expert_dtype(num_experts):
        raise RouteError(
            "dtype", "wrong integer type for routes", got=record.experts.dtype, expected=expert_dtype(num_experts)
        )
    places = range(len(record.layer_ids))
    return list(places) if is_same else [record.layer_ids.index(layer) for layer in layer_ids]
