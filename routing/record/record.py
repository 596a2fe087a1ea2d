"""Choices of the rollout engine's routers for one sequence.

Shape letters: T tokens, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from routing.errors import RouteError
from routing.indexer.record import IndexerRecord

_PART = 1 << 15
_FEW_PAIRS = 1 << 13
_BYTE, _TWO_BYTES = np.dtype(np.uint8), np.dtype(np.uint16)


def token_digest(tokens: np.ndarray, origin: bytes = b"") -> bytes:
    """16-byte digest that binds routes to the token ids `[T]` they belong to (blake2b over little-endian int32).

    With an `origin`, also to what that stands for (`sample_origin`): it is the key of the hash.
    """
    return ids_digest(np.ascontiguousarray(tokens, dtype="<i4").tobytes(), origin)


def ids_digest(ids: bytes, origin: bytes = b"") -> bytes:
    """`token_digest` of ids that are little-endian int32 already."""
    return hashlib.blake2b(ids, digest_size=16, key=origin).digest()


def sample_origin(sample_id: int, versions: np.ndarray) -> bytes:
    """16 bytes that stand for a sample and the weight version `[S]` of each token sampled in it.

    Two samples may have the same tokens, and so may a sample of older weights.
    """
    hasher = hashlib.blake2b(int(sample_id).to_bytes(8, "little", signed=True), digest_size=16)
    hasher.update(np.ascontiguousarray(versions, dtype="<i8").tobytes())
    return hasher.digest()


def expert_dtype(num_experts: int) -> np.dtype:
    """Smallest unsigned integer type that holds every expert id: uint8 up to 256 experts, else uint16."""
    return _BYTE if num_experts <= 256 else _TWO_BYTES


@dataclass(frozen=True)
class RouteRecord:
    """Expert ids chosen for one sequence of `T` tokens.

    Row `r` is the routing of input token `r`, which predicts token `r + 1`; the last token is never forwarded, so there
    are `T - 1` rows.

    Attributes:
        experts: `[T-1, L, K]` expert ids in the engine's order, uint8 or uint16 (see `expert_dtype`).
        layer_ids: the model's 0-based decoder layer of each of the `L` recorded MoE layers, ascending. Dense layers are
            absent.
        num_experts: `E`, routed experts per layer.
        token_digest: `token_digest(tokens)` of the sequence, with the origin of its sample once that is known (`bind`).
            None where the tokens are not known yet.
        order: `engine` while ids stand in the order the engine gave them; `set` after an order-free codec, when they
            ascend.
        covered: `[T-1]` bool, rows whose routes are known, or None when all are. A row that is not covered holds
            `0..K-1` in every layer as a mark; it is never replayed: a replayer refuses it, or leaves the token to the
            live router and counts it.
        indexer: positions that the indexers of sparse attention chose for the same tokens; None of other models.
    """

    experts: np.ndarray
    layer_ids: tuple[int, ...]
    num_experts: int
    token_digest: bytes | None = None
    order: Literal["engine", "set"] = "engine"
    covered: np.ndarray | None = None
    indexer: IndexerRecord | None = None

    @property
    def num_rows(self) -> int:
        return int(self.experts.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    def uncover(self, rows: slice | np.ndarray) -> RouteRecord:
        """The same record without the routes of `rows` (a slice or a bool array), e.g. of other weights."""
        experts, covered = self.experts.copy(), self.coverage().copy()
        covered[rows] = False
        experts[~covered] = np.arange(self.top_k, dtype=experts.dtype)
        return replace(self, experts=experts, covered=None if covered.all() else covered)

    def coverage(self) -> np.ndarray:
        """`[T-1]` bool, True on the rows whose routes are known."""
        return np.ones(self.num_rows, dtype=bool) if self.covered is None else self.covered

    def select(self, layer_ids: Sequence[int]) -> RouteRecord:
        """The same record with only `layer_ids`, e.g. one pipeline stage's.

        Raises `RouteError` on a layer that was not recorded.
        """
        missing = [layer for layer in layer_ids if layer not in self.layer_ids]
        if missing:
            raise RouteError("layers", "layers were not recorded", got=self.layer_ids, expected=tuple(layer_ids))
        columns = [self.layer_ids.index(layer) for layer in layer_ids]
        return replace(self, experts=self.experts[:, columns], layer_ids=tuple(layer_ids))

    def validate(self, num_tokens: int | None = None, *, in_range: bool = False) -> None:
        """Raise `RouteError` unless every invariant holds.

        Args:
            num_tokens: there must be `num_tokens - 1` rows; None: any number.
            in_range: the caller has found every id below `num_experts`, before they were narrowed.
        """
        experts = self.experts
        if experts.ndim != 3:
            raise RouteError("shape", "routes need three dimensions", got=experts.shape, expected="[T-1, L, K]")
        rows, layers, top_k = experts.shape
        if experts.dtype != expert_dtype(self.num_experts):
            raise RouteError(
                "dtype", "wrong integer type for routes", got=experts.dtype, expected=expert_dtype(self.num_experts)
            )
        if layers != len(self.layer_ids) or list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise RouteError(
                "layers",
                "layer ids do not describe the recorded layers",
                got=self.layer_ids,
                expected=f"{layers} distinct ascending ids",
            )
        if num_tokens is not None and rows != num_tokens - 1:
            raise RouteError(
                "rows",
                "wrong number of route rows",
                got=rows,
                expected=num_tokens - 1,
                fix="One row per forwarded token: all but the last.",
            )
        if not 1 <= top_k <= self.num_experts:
            raise RouteError("shape", "experts per token out of range", got=top_k, expected=f"1..{self.num_experts}")
        if not in_range and experts.size and int(experts.max()) >= self.num_experts:
            row, layer, _ = np.argwhere(experts >= self.num_experts)[0]
            raise RouteError(
                "range",
                "expert id out of range",
                where=f"row {row}, layer {self.layer_ids[layer]}",
                got=experts[row, layer].tolist(),
                expected=f"0..{self.num_experts - 1}",
            )
        if has_repeats(experts):
            row, layer = np.argwhere(_repeated(experts))[0]
            raise RouteError(
                "duplicate",
                "an expert appears twice in one row",
                where=f"row {row}, layer {self.layer_ids[layer]}",
                got=experts[row, layer].tolist(),
                expected="distinct ids",
            )

        self._check_coverage()

    def _check_coverage(self) -> None:
        if self.covered is None:
            return
        if self.covered.dtype != bool or self.covered.shape != (self.num_rows,):
            raise RouteError(
                "rows",
                "coverage does not describe the rows",
                got=f"{self.covered.dtype} {self.covered.shape}",
                expected=f"bool {(self.num_rows,)}",
            )
        if (self.experts[~self.covered] != np.arange(self.top_k)).any():
            raise RouteError("rows", "a row without routes holds ids other than the mark", expected="0..K-1")

    def bind(self, tokens: np.ndarray, origin: bytes) -> RouteRecord:
        """The same record as that of one sample with these token ids `[T]`; raises as `check_tokens` does."""
        ids = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        check_ids(self, ids)
        digest = ids_digest(ids, origin)
        values = self.experts, self.layer_ids, self.num_experts
        return RouteRecord(*values, digest, self.order, self.covered, self.indexer)

    def check_tokens(self, tokens: np.ndarray, origin: bytes = b"") -> None:
        """Raise `RouteError` unless this record was made for exactly these token ids `[T]`, and bound to `origin`."""
        check_ids(self, np.ascontiguousarray(tokens, dtype="<i4").tobytes(), origin)


def check_ids(record: RouteRecord, ids: bytes, origin: bytes = b"") -> None:
    """`RouteRecord.check_tokens` of ids that are little-endian int32 already."""
    expected = ids_digest(ids, origin)
    if record.token_digest is None or record.token_digest != expected:
        raise RouteError(
            "digest",
            "routes belong to other tokens" + (", to another sample or to other weights" if origin else ""),
            got=record.token_digest.hex() if record.token_digest else None,
            expected=expected.hex(),
            fix="The record is stale or was swapped with another sample's.",
        )


def has_repeats(experts: np.ndarray) -> bool:
    """True when an id appears twice among the K of a row."""
    flat_MK = experts.reshape(-1, experts.shape[-1])
    if flat_MK.size * flat_MK.shape[1] > _FEW_PAIRS:
        return bool(_repeated(experts).any())
    # Of few ids it is the number of operations that takes time.
    if flat_MK.shape[1] == 2:
        return bool((flat_MK[:, 0] == flat_MK[:, 1]).any())
    # Each id equals itself, and no other.
    return int(np.count_nonzero(flat_MK[:, :, None] == flat_MK[:, None, :])) != flat_MK.size


def _repeated(experts: np.ndarray) -> np.ndarray:
    """`[T-1, L]` bool: an id appears twice among the K of its row.

    Pairs of whole columns compare several times faster than sorting rows.
    """
    flat_MK = experts.reshape(-1, experts.shape[-1])
    repeated_M = np.zeros(len(flat_MK), dtype=bool)
    # In parts: the copy stays in the cache, and memory does not double on long sequences.
    for start in range(0, len(flat_MK), _PART):
        columns_KM = np.ascontiguousarray(flat_MK[start : start + _PART].T)
        repeated_part = repeated_M[start : start + _PART]
        for first, second in combinations(range(len(columns_KM)), 2):
            repeated_part |= columns_KM[first] == columns_KM[second]
    return repeated_M.reshape(experts.shape[:-1])
