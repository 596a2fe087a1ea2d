"""The positions of one forward. Shape letters: B sequences, R columns, N = B * R tokens, K positions of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from routing.indexer.record import IndexerRecord
from routing.layout.rows import Rows


class IndexerPass:
    """The positions of one forward, and of its recomputation.

    Args:
        sets: of each sequence; None where it has no tokens. Empty: none are replayed.
        recorded: `[B, R, K]` positions of an earlier pass by layer, to be replayed; empty: none are.
        rows: where the sequences lie; None: nothing is replayed.
        records: keep what the live indexers choose.
        whole_sequences: the last token of each sequence is in its row, and has no record.
        judged: by sequence, whether it is held against the live indexer.
        top_k: K.

    Attributes:
        kept: positions by layer that were recorded, or are replayed.
        keys: of the sequences, for messages.
        lost_N: positions that each token lost, over all layers with an indexer.
        chance_N: how many chance would lose in a layer; 0 for tokens that are not judged, or see no more than K.
        proved: forwards of each layer with sparse attention.
    """

    def __init__(
        self,
        sets: Sequence[IndexerRecord | None] = (),
        recorded: Mapping[int, Tensor] | None = None,
        rows: Rows | None = None,
        *,
        records: bool = False,
        whole_sequences: bool = False,
        judged: Sequence[bool] = (),
        top_k: int = 0,
    ) -> None:
        self.sets, self.kept, self.records = tuple(sets), dict(recorded or {}), records
        self.replays = bool(self.sets or self.kept)
        self.keys: Sequence[int] = ()
        self.proved: dict[int, int] = {}
        self.spans: list[tuple[int, int, int]] = []
        """Row, first column and number of due tokens of each sequence."""
        if rows is None:
            return
        num_columns = rows.shape[1]
        self.rows, self.due_BR = rows, rows.without_last() if whole_sequences else rows.mask()
        num_places = rows.shape[0] * num_columns
        self.lost_N, self.chance_N = torch.zeros(num_places, dtype=torch.int32), np.zeros(num_places)
        for (start, stop), is_judged in zip(rows.spans, judged, strict=True):
            length = max(0, stop - start - whole_sequences)
            self.spans.append((start // num_columns, start % num_columns, length))
            seen = 1 + np.arange(length)
            self.chance_N[start : start + length] = is_judged * np.where(seen > top_k, top_k * (1 - top_k / seen), 0.0)
