"""The optional inputs of rules and losses, in one table: what each is, and whether it is by token or by row.

A new input is one field here. What carries it to rules and losses, over ranks and into recordings goes by this table.
Shape letters: B rows of a micro-batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from torch import Tensor

_BY_TOKEN = {"by_row": False, "of_pass": False}
_OF_PASS = {"by_row": False, "of_pass": True}
_BY_ROW = {"by_row": True, "of_pass": False}


@dataclass(frozen=True, kw_only=True)
class RowFields:
    """Values of the rows of a micro-batch beside ratios, masks and advantages; None: not known here.

    `[B, T]` values are read only where a token was sampled. A field that `TokenBatch` or `Scores` has by the same name
    is taken from there (`with_fields`).

    Attributes:
        turn_ids: `[B, T]` turn of each token.
        versions: `[B, T]` weight version that sampled each token.
        exact_kl: `[B, T]` KL(mu || pi_theta) of each context over the recorded support.
        reference_logprobs: `[B, T]` log-prob of each token under the reference or a teacher.
        entropy: `[B, T]` predictive entropy at each token, with gradient in updates; of one pass alone.
        router_shift: `[B, T]` shift of the routers' scores since the anchor (`routing.record.router_shift`); of one
            pass alone.
        rewards: `[B]` reward of each row.
        group_ids: `[B]` prompt of each row.
        group_means: `[B]` mean reward of all samples of the row's prompt, on whatever ranks and micro-batches they are.
    """

    turn_ids: Tensor | None = field(default=None, metadata=_BY_TOKEN)
    versions: Tensor | None = field(default=None, metadata=_BY_TOKEN)
    exact_kl: Tensor | None = field(default=None, metadata=_BY_TOKEN)
    reference_logprobs: Tensor | None = field(default=None, metadata=_BY_TOKEN)
    entropy: Tensor | None = field(default=None, metadata=_OF_PASS)
    router_shift: Tensor | None = field(default=None, metadata=_OF_PASS)
    rewards: Tensor | None = field(default=None, metadata=_BY_ROW)
    group_ids: Tensor | None = field(default=None, metadata=_BY_ROW)
    group_means: Tensor | None = field(default=None, metadata=_BY_ROW)

    def with_fields(self, *sources: object) -> Self:
        """The same with every field that one of the sources knows."""
        return replace(self, **shared(type(self), *sources))


BY_ROW: Mapping[str, bool] = {row_field.name: row_field.metadata["by_row"] for row_field in fields(RowFields)}
"""True for a field with one entry for each row."""

GATHERED = tuple(row_field.name for row_field in fields(RowFields) if not row_field.metadata["of_pass"])
"""Fields that travel between ranks where a whole minibatch is looked at."""


def shared(kind: type, *sources: object) -> dict[str, Any]:
    """The fields of this table that the dataclass `kind` has, each from the source that knows it."""
    candidates = ((name, getattr(source, name, None)) for name in BY_ROW for source in sources)
    field_names = {row_field.name for row_field in fields(kind)}
    return {name: value for name, value in candidates if value is not None and name in field_names}
