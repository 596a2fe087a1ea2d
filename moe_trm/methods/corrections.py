"""The built-in corrections by name: the table that the configuration checks and `moe_trm.corrections` imports from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moe_trm.methods.built_in import declarations


@dataclass(frozen=True)
class CorrectionEntry:
    """One row of the table.

    Attributes:
        module: of `moe_trm.corrections`, where the rule is defined.
        ratio: the one it reads, unless told otherwise.
        scope: `token`, `sequence` or `batch`.
        weighs: it gives weights other than 0 and 1, unless its threshold `weight` is `one`.
        weight: default of that threshold; None: it has none.
    """

    module: str
    ratio: str
    scope: str
    weighs: bool = False
    weight: str | None = None


CORRECTIONS: Mapping[str, CorrectionEntry] = MappingProxyType(
    {name: CorrectionEntry(**entry) for name, entry in declarations("corrections").items()}
)
