"""Rows of a dump in one form, whoever wrote it, and the questions that stay open for want of a field.

Shape letters: T tokens of a row, S sampled tokens, D layers of the recorded routes, K experts per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_trm.errors import BundleError, RecordRejected
from moe_trm.sampling_mask.record import SamplingMask

Array = NDArray[Any]


@dataclass(frozen=True)
class AuditRow:
    """One sequence of a dump. A field that the dump does not have is None.

    Attributes:
        name: how messages call it, unique in a dump.
        tokens: `[T]` int64.
        sampled: `[T]` bool, True on the S tokens that the policy sampled and the trainer counts.
        rollout: `[S]` float64 log-probs of the rollout engine.
        trainer: `[S]` float64 log-probs of the trainer at the start of the step.
        advantages: `[S]` float64.
        routes: `[T-1, D, K]` integers as they were recorded, legal or not.
        mask: ids that the sampler kept at the S tokens.
        versions: `[S]` str, weights that sampled each token.
        temperature: of sampling.
    """

    name: str
    tokens: Array
    sampled: Array
    rollout: Array | None = None
    trainer: Array | None = None
    advantages: Array | None = None
    routes: Array | None = None
    mask: SamplingMask | None = None
    versions: Array | None = None
    temperature: float | None = None

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.sampled))

    @property
    def places(self) -> Array:
        """`[S]` rows of the forward that predict the sampled tokens."""
        return np.flatnonzero(self.sampled) - 1

    @property
    def prompt(self) -> bytes:
        """The tokens before the first sampled one: rows with the same are of one prompt."""
        return self.tokens[: int(np.argmax(self.sampled))].tobytes()


OPTIONAL = {
    "rollout": ("log-probs of the rollout", "whether the rollout engine has these weights, temperature and support"),
    "trainer": ("log-probs of the trainer", "which of the two engines is off"),
    "routes": ("expert routes", "whether routes are those of their tokens, and which share of the mismatch is routing"),
    "mask": ("kept ids of the sampler", "whether sampling masks are those of the sampler"),
    "versions": ("weight versions", "which tokens were sampled by older weights"),
    "temperature": ("the sampling temperature", "every question about log-probs and masks; give --temperature"),
    "advantages": ("advantages", "how much of the gradient the affected tokens carry"),
}
"""Field -> its name, and the question that cannot be answered without it."""


@dataclass(frozen=True)
class AuditDump:
    """The rows of all files.

    Attributes:
        framework: who wrote it.
        rows: those that can be judged.
        rejected: how many could not, by reason.
    """

    framework: str
    rows: tuple[AuditRow, ...]
    rejected: Mapping[str, int] = field(default_factory=dict)

    def lacking(self) -> dict[str, int]:
        """Rows without a field, for each field of `OPTIONAL` that some row lacks."""
        counts = {name: sum(getattr(row, name) is None for row in self.rows) for name in OPTIONAL}
        return {name: count for name, count in counts.items() if count}


def checked(row: AuditRow) -> AuditRow:
    """The row itself. Raises `RecordRejected` where its fields do not fit each other."""
    num_tokens = len(row.tokens)
    if row.tokens.ndim != 1 or row.tokens.dtype.kind not in "iu" or num_tokens < 2:
        raise RecordRejected("tokens", "tokens are no list of at least two ids", where=row.name, got=row.tokens.shape)
    if row.sampled.shape != (num_tokens,) or not row.sampled.any() or row.sampled[0]:
        raise RecordRejected(
            "sampled",
            "no token is marked as sampled, or the first one is, or marks do not fit the tokens",
            where=row.name,
            got=f"{int(row.sampled.sum())} of {row.sampled.shape}",
            expected=f"marks of {num_tokens} tokens",
        )
    for name in ("rollout", "trainer", "advantages", "versions"):
        values = getattr(row, name)
        if values is not None and values.shape != (row.num_sampled,):
            raise RecordRejected(
                name, f"{name}: not one value for each sampled token", where=row.name, got=values.shape,
                expected=row.num_sampled,
            )  # fmt: skip
    for name in ("rollout", "trainer", "advantages"):
        values = getattr(row, name)
        if values is not None and not np.isfinite(values).all():
            raise RecordRejected(f"{name}_finite", f"{name}: values that are not finite", where=row.name)
    _check_records(row)
    return row


def _check_records(row: AuditRow) -> None:
    if row.routes is not None and (
        row.routes.ndim != 3 or len(row.routes) != len(row.tokens) - 1 or row.routes.dtype.kind not in "iu"
    ):
        raise RecordRejected(
            "route_rows", "routes are not integers with one row for each token but the last", where=row.name,
            got=f"{row.routes.dtype} {row.routes.shape}", expected=f"[{len(row.tokens) - 1}, layers, experts]",
        )  # fmt: skip
    if row.mask is None:
        return
    offsets = row.mask.offsets
    legal = len(offsets) == row.num_sampled + 1 and offsets[0] == 0 and offsets[-1] == len(row.mask.ids)
    if not legal or (np.diff(offsets) < 0).any():
        raise RecordRejected(
            "mask_shape", "kept ids do not fit the sampled tokens", where=row.name, got=len(offsets) - 1,
            expected=row.num_sampled,
        )  # fmt: skip


def gather(framework: str, parts: Sequence[AuditRow | RecordRejected], *, beside: Sequence[AuditRow] = ()) -> AuditDump:
    """A dump of rows, those of one name joined. A row that does not fit is counted under its reason.

    `beside`: rows whose trainer log-probs are added to those of the same name. Raises `BundleError` where none is.
    """
    rejected: Counter[str] = Counter()
    by_name: dict[str, AuditRow] = {}
    for part in parts:
        try:
            row = checked(_raised(part))
            by_name[row.name] = joined(by_name[row.name], row) if row.name in by_name else row
        except RecordRejected as error:
            rejected[error.reason] += 1
    if beside and by_name and not by_name.keys() & {row.name for row in beside}:
        raise BundleError(
            "no row of the learner's scores is one of the dump",
            where="--learner-scores",
            got=beside[0].name,
            expected=f"ids such as {next(iter(by_name))!r}",
        )
    for row in beside:
        if row.name in by_name:
            by_name[row.name] = joined(by_name[row.name], replace(row, rollout=None, routes=None, mask=None))
    return AuditDump(framework, tuple(by_name.values()), dict(rejected))


def joined(row: AuditRow, second: AuditRow) -> AuditRow:
    """The fields of one row in two files. Raises `RecordRejected` (`joined`) where they are of different tokens."""
    if not (np.array_equal(row.tokens, second.tokens) and np.array_equal(row.sampled, second.sampled)):
        raise RecordRejected("joined", "two files have different tokens under one name", where=row.name)
    lacking = {f.name: getattr(second, f.name) for f in fields(row) if getattr(row, f.name) is None}
    return replace(row, **lacking)


def _raised(part: AuditRow | RecordRejected) -> AuditRow:
    if isinstance(part, RecordRejected):
        raise part
    return part
