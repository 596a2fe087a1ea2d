"""What replay means, engine by engine the same: whose routes a forward pass uses, and the proof that it did.

Shape letters: N local tokens in router order, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from routing.record import RouteRecord


@dataclass(frozen=True)
class Recorded:
    """Routes one forward pass used on this rank: layer id -> `[N, K]` int64 expert ids in router order."""

    experts: Mapping[int, Tensor]


@dataclass(frozen=True)
class Native:
    """The live router chooses."""


@dataclass(frozen=True)
class Record:
    """The live router chooses and its choice is kept (R2's recording pass, native probe)."""


@dataclass(frozen=True)
class ReplayRecords:
    """R3: the rollout's routes, one record per row of the micro-batch, in order. Padding rows have None."""

    records: tuple[RouteRecord | None, ...]


@dataclass(frozen=True)
class ReplayRecorded:
    """R2: the routes an earlier pass of this learner recorded for the same micro-batch."""

    recorded: Recorded


RouteSource = Native | Record | ReplayRecords | ReplayRecorded


@dataclass(frozen=True)
class ReplayReport:
    """Counters over all replayed forwards of a step, in token-layers without padding.

    Attributes:
        replayed: token-layers that had to use a recorded route.
        matched: of these, how many the dispatcher's own routing map matched exactly.
        local_flips: of these, how many the live router would have chosen differently.
        local_flips_by_layer: layer id -> local flip rate.
    """

    replayed: int = 0
    matched: int = 0
    local_flips: int = 0
    local_flips_by_layer: Mapping[int, float] = field(default_factory=dict)

    @property
    def applied_fraction(self) -> float:
        """`matched / replayed`; 1.0 on every proved step, and when nothing was replayed."""
        return self.matched / self.replayed if self.replayed else 1.0

    @property
    def local_flip_rate(self) -> float:
        """`local_flips / replayed`; about 0.02 for aligned routes of a bfloat16 rollout, 0.8 for rows shifted by one."""
        return self.local_flips / self.replayed if self.replayed else 0.0
