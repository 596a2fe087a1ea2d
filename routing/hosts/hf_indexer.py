"""Replay of the positions that indexers choose, on transformers' sparse models, with the proof that it happened.

A forward hook on each indexer puts the recorded sets in the place of its choice, and counts how far it is from them.
The model's attention (`routing.indexer.attention`) says what its tokens see. That is compared with a second cut of the
record, made by other code. Layers that share the choice of an earlier one are compared with the record of that one.

Nothing but the choice is replaced, and no gradient comes through it in any case.

Shape letters: B sequences, R columns, N = B * R tokens in batch order, K positions of a token, C columns that are seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from routing.errors import ReplayProofError, ReplayRefusedError, RouteError
from routing.indexer import proof
from routing.indexer.attention import NAME, PROOF
from routing.indexer.one_pass import IndexerPass
from routing.indexer.record import IndexerRecord, check_positions
from routing.layout.columns import Columns
from routing.record.record import RouteRecord
from routing.record.sources import Native, Record, ReplayRecords, RouteSource
from routing.replay.running import RunningPass


class IndexerReplay:
    """Hooks on the indexers of one model, and their counters. A model without indexers has none.

    Args:
        sparse: the indexers.
        num_layers: decoder layers that are counted.
        device: of the counters.
    """

    def __init__(self, sparse: Indexers, num_layers: int, device: torch.device) -> None:
        self._indexers, self.source_of = sparse.own, sparse.source_of
        self.top_k = int(next(iter(self._indexers.values())).index_topk) if self._indexers else 0
        self._counters = torch.zeros(num_layers, proof.APART + 1, dtype=torch.int64, device=device)
        self._passes: list[IndexerPass] = []
        self._device = device

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """0-based decoder layers with an indexer of their own, ascending."""
        return tuple(self._indexers)

    def attach(self, body: nn.Module, running: RunningPass) -> list[Any]:
        """The hooks; none on a model without indexers."""
        if not self._indexers:
            return []
        options_of_proof = {PROOF: partial(self._prove, running)}
        hooks: list[Any] = [
            body.register_forward_pre_hook(
                lambda _body, args, options: (args, {**options, **options_of_proof}), with_kwargs=True
            )
        ]
        return hooks + [
            module.register_forward_hook(partial(self._choose, running, layer))
            for layer, module in self._indexers.items()
        ]

    def open(self, source: RouteSource, columns: Columns, *, whole_sequences: bool) -> IndexerPass:
        """Begin a forward.

        Raises:
            RouteError: `positions`, records without those of all of this model's indexers for all of their rows, or a
                recorded pass without; `shape`, packs or a part of the columns, in which positions are not replayed.
        """
        if not self._indexers or isinstance(source, Native):
            return self._opened(IndexerPass())
        if columns.cuts or columns.rows.is_packed:
            raise RouteError(
                "shape",
                "positions of sparse attention are replayed in padded rows only",
                got=columns.rows.name + (", a part of the columns" if columns.cuts else ""),
                expected="padded rows, all columns",
                fix="Set batch.layout=padded; context and sequence parallelism are not there for these models.",
            )
        if isinstance(source, Record):
            return self._opened(IndexerPass(records=True))
        rows, sequences = columns.rows, len(columns.rows.spans)
        if isinstance(source, ReplayRecords):
            at = source.at_sampling or (None,) * sequences
            opened = IndexerPass(
                self._sets(source.records),
                rows=rows,
                whole_sequences=whole_sequences,
                judged=[judged_row is not False for judged_row in at],
                top_k=self.top_k,
            )
        else:
            if tuple(sorted(source.recorded.positions)) != self.layer_ids:
                raise RouteError(
                    "positions",
                    "a recorded pass has no positions of some indexers",
                    got=sorted(source.recorded.positions),
                    expected=self.layer_ids,
                )
            judged = [True] * sequences
            opened = IndexerPass(
                (), source.recorded.positions, rows, whole_sequences=whole_sequences, judged=judged, top_k=self.top_k
            )
        opened.lost_N = opened.lost_N.to(self._device)
        self._passes.append(opened)
        return self._opened(opened)

    def _opened(self, opened: IndexerPass) -> IndexerPass:
        opened.proved = dict.fromkeys(self.source_of, 0)
        return opened

    def _sets(self, records: Sequence[RouteRecord | None]) -> list[IndexerRecord | None]:
        for row, record in enumerate(records):
            if record is not None:
                # Rows without routes would have positions of other weights, or none.
                positions = record.indexer if record.covered is None else None
                check_positions(positions, self.layer_ids, self.top_k, record.num_rows, f"row {row}")
        return [None if record is None else record.indexer for record in records]

    def check_proved(self, opened: IndexerPass) -> None:
        """Raise `ReplayProofError` unless every layer with sparse attention was forwarded once in `opened`."""
        wrong = {layer: count for layer, count in opened.proved.items() if count != 1}
        if wrong:
            raise ReplayProofError(
                f"sparse attention must be forwarded once inside `use`; forwards by layer: {wrong}. The model hands "
                "its keywords through to attention, and its attention is still the one it was loaded with?"
            )

    def take(self) -> tuple[Tensor, list[str]]:
        """The counters `[layers, 7]`, and this rank's samples that are apart. Reset by the call."""
        named: list[str] = []
        for opened in self._passes:
            chance_N = opened.chance_N * len(self._indexers)
            named += proof.apart(opened.lost_N.cpu().numpy(), chance_N, opened.rows.sequence_of().numpy(), opened.keys)
        self._passes.clear()
        counters = self._counters.clone()
        counters[0, proof.APART] = len(named)
        self._counters.zero_()
        return counters, named

    def _choose(self, running: RunningPass, layer: int, _indexer: nn.Module, _args: Any, live: Tensor) -> Tensor | None:
        opened, recompute = running.current()
        indexer_pass: IndexerPass = opened.indexer
        if indexer_pass.records:
            return indexer_pass.kept[layer] if recompute else indexer_pass.kept.setdefault(layer, live.detach())
        if not indexer_pass.replays:
            return None
        target = indexer_pass.kept[layer] if indexer_pass.kept else placed(indexer_pass, layer, live, self.top_k)
        if not recompute:
            self._count(indexer_pass, layer, live, target)
        return target

    @torch.no_grad()
    def _count(self, indexer_pass: IndexerPass, layer: int, live: Tensor, target: Tensor) -> None:
        chosen_BRC = torch.zeros(*live.shape[:2], live.shape[1], dtype=torch.bool, device=live.device)
        chosen_BRC.scatter_(-1, live.long(), True)
        lost_N = (~chosen_BRC.gather(-1, target.long())).sum(-1, dtype=torch.int32).flatten()
        has_set_N = torch.from_numpy(indexer_pass.chance_N > 0).to(live.device)
        lost_N = lost_N * has_set_N
        indexer_pass.lost_N += lost_N
        counted = self._counters[layer]
        counted[proof.SETS] += has_set_N.sum()
        counted[proof.FLIPPED] += (lost_N > 0).sum()
        counted[proof.LOST] += lost_N.sum()
        counted[proof.CHANCE] += round(float(indexer_pass.chance_N.sum()) * proof.UNIT)

    @torch.no_grad()
    def _prove(self, running: RunningPass, layer: int, sees_BRC: Tensor) -> None:
        opened, recompute = running.current()
        indexer_pass: IndexerPass = opened.indexer
        if not recompute:
            indexer_pass.proved[layer] += 1
        if not indexer_pass.replays:
            return
        due_BR = indexer_pass.due_BR.to(sees_BRC.device)
        expected_BRC = second_cut(indexer_pass, self.source_of[layer], sees_BRC.shape, self.top_k).to(sees_BRC.device)
        self._counters[layer, proof.DUE] += due_BR.sum()
        self._counters[layer, proof.MATCHED] += ((sees_BRC == expected_BRC).all(-1) & due_BR).sum()


def placed(indexer_pass: IndexerPass, layer: int, live: Tensor, top_k: int) -> Tensor:
    """`[B, R, K]` recorded positions of `layer` at their tokens; elsewhere `live`'s.

    A token that sees no more than K gets the first K columns of its sequence, of which causality leaves it all that it
    may see.
    """
    target = live.clone()
    for sets, (row, first, length) in zip(indexer_pass.sets, indexer_pass.spans, strict=True):
        if sets is None:
            continue
        columns = target.shape[-1]
        few = min(top_k, length)
        leading = torch.arange(columns, dtype=live.dtype, device=live.device) + first
        target[row, first : first + few] = leading.clamp(max=live.shape[1] - 1)
        if length > top_k:
            chosen_MK = torch.from_numpy(sets.chosen(layer)) + first
            target[row, first + top_k : first + length] = chosen_MK.to(live.device, live.dtype)
    return target


def second_cut(indexer_pass: IndexerPass, layer: int, shape: Sequence[int], top_k: int) -> Tensor:
    """`[B, R, C]` bool: what each due token must see, by plain index arithmetic on the record of `layer`."""
    expected = np.zeros(tuple(shape), bool)
    if indexer_pass.kept:
        np.put_along_axis(expected, indexer_pass.kept[layer].cpu().numpy().astype(np.int64), True, axis=-1)
        for row, first, _ in indexer_pass.spans:
            expected[row, :, :first] = False
        return torch.from_numpy(np.tril(expected))
    for sets, (row, first, length) in zip(indexer_pass.sets, indexer_pass.spans, strict=True):
        if sets is None:
            continue
        num_first = min(top_k, length)
        expected[row, first : first + num_first, first : first + num_first] = np.tril(
            np.ones((num_first, num_first), bool)
        )
        chosen_MK = sets.chosen(layer)
        flat = np.repeat(np.arange(top_k, top_k + len(chosen_MK)), top_k) * shape[2] + chosen_MK.ravel()
        expected[row].reshape(-1)[flat + first * (shape[2] + 1)] = True
    return torch.from_numpy(expected)


class Indexers(NamedTuple):
    """`own`: decoder layer -> its indexer. `source_of`: layer with sparse attention -> the one that chooses for it."""

    own: dict[int, Any]
    source_of: dict[int, int]


def indexers(model: nn.Module) -> Indexers:
    """The indexers of a model; none of one without sparse attention.

    Raises:
        ReplayRefusedError: the model's attention does not say what it sees.
    """
    result, last = Indexers({}, {}), -1
    named = [(re.search(r"(?:^|\.)layers\.(\d+)\.self_attn$", name), module) for name, module in model.named_modules()]
    for layer, module in sorted((int(at[1]), module) for at, module in named if at and hasattr(module, "indexer")):
        if module.config._attn_implementation != NAME:
            raise ReplayRefusedError(
                "the attention of this model does not say which positions it sees: load it with "
                "attn_implementation=routing.indexer.attention.register()"
            )
        if module.indexer is not None:
            result.own[layer], last = module.indexer, layer
        result.source_of[layer] = last
    return result
