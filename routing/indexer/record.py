"""Positions that the indexers of sparse attention chose for one sequence.

Shape letters: T tokens, M rows with more than K positions, K positions of a row.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from routing.errors import RouteError
from routing.indexer.sets import pack, unpack

_HEAD, _LAYER = struct.Struct("<III"), struct.Struct("<IQ")


@dataclass(frozen=True)
class IndexerRecord:
    """The sets of positions of every forwarded token, as few bytes as they take (`routing.indexer.sets`).

    Row `r` belongs to input token `r`, which sees positions `0..r`. Rows below `top_k` see all of them, and have no
    set. They are bound to their tokens by the `RouteRecord` that holds them.

    Attributes:
        num_rows: forwarded tokens, T - 1.
        top_k: K, `index_topk` of config.json.
        layer_ids: 0-based decoder layers with an indexer of their own, ascending.
        packed: the sets of each of these layers.
    """

    num_rows: int
    top_k: int
    layer_ids: tuple[int, ...]
    packed: tuple[bytes, ...]

    @classmethod
    def of(cls, num_rows: int, top_k: int, positions: Mapping[int, np.ndarray]) -> IndexerRecord:
        """The record of these sets.

        Args:
            num_rows: forwarded tokens.
            top_k: K.
            positions: decoder layer -> `[M, K]` integers, positions of rows K, K + 1, ... in any order.

        Raises:
            RouteError: `shape`, another number of rows or positions; `range`, a position behind its token;
                `duplicate`, one twice in a row.
        """
        packed = []
        for layer in sorted(positions):
            sets_MK = np.sort(np.asarray(positions[layer]), axis=1)
            _check(sets_MK, num_rows, top_k, layer)
            packed.append(pack(sets_MK))
        return cls(num_rows, top_k, tuple(sorted(positions)), tuple(packed))

    def chosen(self, layer: int) -> np.ndarray:
        """`[M, K]` int32: ascending positions of rows K, K + 1, ... in `layer`.

        Raises `RouteError`: `layers`, a layer that was not recorded; `payload`, bytes that are no sets.
        """
        if layer not in self.layer_ids:
            raise RouteError("layers", "no positions of this layer", got=layer, expected=self.layer_ids)
        return unpack(self.packed[self.layer_ids.index(layer)], max(0, self.num_rows - self.top_k), self.top_k)

    def encode(self) -> bytes:
        """As bytes: K, rows and layers as uint32, each layer's id and length, and the sets."""
        head = _HEAD.pack(self.top_k, self.num_rows, len(self.layer_ids))
        table = [_LAYER.pack(layer, len(sets)) for layer, sets in zip(self.layer_ids, self.packed, strict=True)]
        return b"".join([head, *table, *self.packed])

    @classmethod
    def decode(cls, data: bytes) -> IndexerRecord:
        """Inverse of `encode`. Raises `RouteError` (`payload`)."""
        try:
            top_k, num_rows, layers = _HEAD.unpack_from(data)
            table = [_LAYER.unpack_from(data, _HEAD.size + place * _LAYER.size) for place in range(layers)]
        except struct.error as error:
            raise RouteError(
                "payload", "packed positions are damaged", got="cut", expected="unchanged bytes"
            ) from error
        start, packed = _HEAD.size + layers * _LAYER.size, []
        for _, length in table:
            packed.append(data[start : start + length])
            start += length
        if start != len(data) or not top_k or [layer for layer, _ in table] != sorted({layer for layer, _ in table}):
            raise RouteError("payload", "packed positions are damaged", got=len(data), expected=f"{start} bytes")
        return cls(num_rows, top_k, tuple(layer for layer, _ in table), tuple(packed))


def check_positions(
    record: IndexerRecord | None, layer_ids: tuple[int, ...], top_k: int, num_rows: int, where: str
) -> None:
    """Raise `RouteError` (`positions`) unless a record of `num_rows` routes has the positions of all of these layers.

    Args:
        record: the positions; None: there are none.
        layer_ids: layers with an indexer.
        top_k: K of the model.
        num_rows: rows of the record's routes.
        where: for the message.
    """
    got = None if record is None else (record.layer_ids, record.top_k, record.num_rows)
    if got != (layer_ids, top_k, num_rows):
        raise RouteError(
            "positions",
            "the record lacks positions that the indexers of sparse attention chose",
            where=where,
            got="none" if got is None else "layers {}, {} of each of {} rows".format(*got),
            expected=f"layers {layer_ids}, {top_k} of each of {num_rows} rows",
            fix="Record positions with the routes of every sample: sets are never filled in.",
        )


def _check(sets_MK: np.ndarray, num_rows: int, top_k: int, layer: int) -> None:
    expected_shape = (max(0, num_rows - top_k), top_k)
    if sets_MK.shape != expected_shape or sets_MK.dtype.kind not in "iu":
        raise RouteError(
            "shape",
            "sets of positions have another shape",
            where=f"layer {layer}",
            got=f"{sets_MK.dtype} {sets_MK.shape}",
            expected=f"integers {expected_shape}, of the rows that see more than {top_k} positions",
        )
    for reason, what, wrong_M in (
        (
            "range",
            "a position lies behind its token",
            (sets_MK[:, -1] > top_k + np.arange(expected_shape[0])) | (sets_MK[:, 0] < 0),
        ),
        ("duplicate", "a position appears twice in one row", (np.diff(sets_MK, axis=1) == 0).any(1)),
    ):
        if wrong_M.any():
            row = int(wrong_M.argmax())
            raise RouteError(
                reason,
                what,
                where=f"row {row + top_k}, layer {layer}",
                got=sets_MK[row].tolist()[:16],
                expected=f"{top_k} of 0..{row + top_k}",
            )
