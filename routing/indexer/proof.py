"""Counts of replayed positions, and the bound on how far they may be from the live indexer's own choice.

A set of K of `n` positions without any relation to the live one loses `K (1 - K / n)` of them by chance. So what is
lost is measured in this unit: 0 for the same set, about 1 for an unrelated one, whatever K and `n` are. A token is
apart when it lies, over all layers, nearer to 1 than to the median token of its micro-batch. Rounding moves positions
near the threshold of a set, and sets no token apart; weights that have moved move the median, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from routing.errors import MisalignedError, ReplayProofError
from routing.layout.row_ids import name_of

DUE, MATCHED, SETS, FLIPPED, LOST, CHANCE, APART = range(7)
"""Columns of the counters `[layers, 7]`.

- tokens that had to see recorded positions, and those that saw exactly these, by layer with attention.
- sets that are recorded, and sets that the live indexer would have chosen otherwise, by layer with an indexer.
- positions of them that it would not have chosen, and how many chance would lose, in `UNIT`.
- samples whose tokens are apart, in the first row.
"""
UNIT = 256
"""Parts of a position in which expected losses are counted."""
HALF = 0.5
"""Part of the losses by chance from which a whole layer is wrong."""
EVIDENCE = 6.0
"""Positions that a token must be expected to lose by chance to be judged."""
SHARE, FEWEST = 0.05, 3
"""Tokens apart that make a sample wrong: this share of those judged, and this many."""


@dataclass(frozen=True)
class IndexerReport:
    """Counts over all replayed forwards of a step.

    Attributes:
        replayed: tokens of layers with sparse attention that had to see recorded positions; all of them did.
        sets: recorded sets of tokens that see more than K positions, by layer with an indexer of its own.
        flips: of these, how many the live indexer would have chosen otherwise, in any position.
        lost, chance: positions of them that it would not have chosen, and how many unrelated sets would lose.
        lost_by_layer: layer id -> `lost / chance`.
    """

    replayed: int = 0
    sets: int = 0
    flips: int = 0
    lost: int = 0
    chance: float = 0.0
    lost_by_layer: Mapping[int, float] = field(default_factory=dict)

    @property
    def flip_rate(self) -> float | None:
        """`flips / sets`. With large K nearly every set of another engine flips in some position."""
        return self.flips / self.sets if self.sets else None

    @property
    def lost_share(self) -> float | None:
        """`lost / chance`: 0 for the live indexer's own sets, about 1 for unrelated ones."""
        return self.lost / self.chance if self.chance else None

    def __add__(self, other: IndexerReport) -> IndexerReport:
        """Counts of both; every layer sees the same tokens."""
        chance = self.chance + other.chance
        by_layer = {
            layer: sum(report.chance * report.lost_by_layer.get(layer, 0.0) for report in (self, other)) / chance
            for layer in {**self.lost_by_layer, **other.lost_by_layer}
        }
        return IndexerReport(
            self.replayed + other.replayed,
            self.sets + other.sets,
            self.flips + other.flips,
            self.lost + other.lost,
            chance,
            by_layer,
        )


def judge_indexers(
    counters: Tensor, named: Sequence[str], *, bounded: bool
) -> tuple[IndexerReport | None, MisalignedError | None]:
    """The report of counters `[layers, 7]` of all ranks, and what is wrong with the sets. None: nothing.

    Args:
        counters: see `DUE`.
        named: samples of this rank that are apart.
        bounded: False: no disagreement is too much.

    Raises:
        ReplayProofError: a token did not see its recorded positions.
    """
    rows = counters.tolist()
    for layer, row in enumerate(rows):
        if row[DUE] != row[MATCHED]:
            raise ReplayProofError(
                f"layer {layer}: {row[DUE]} tokens had to see recorded positions, attention saw exactly them for "
                f"{row[MATCHED]}. The step must not be trained on."
            )
    if not (replayed := sum(row[DUE] for row in rows)):
        return None, None
    by_layer = {layer: UNIT * row[LOST] / row[CHANCE] for layer, row in enumerate(rows) if row[CHANCE]}
    columns, fault = counters.sum(0).tolist(), None
    if bounded and columns[APART]:
        listed = "".join(f"\n  {line}" for line in named[:16]) or " They are on other ranks."
        fault = MisalignedError(
            f"recorded positions of {columns[APART]} samples have little to do with those that the live indexer "
            f"chooses: they are of other tokens or layers. Nothing was trained on this update.{listed}"
        )
    elif bounded and max(by_layer.values(), default=0.0) > HALF:
        fault = MisalignedError(
            "recorded positions of a layer have little to do with those that the live indexer chooses, as shares of "
            f"what chance would lose by layer: {by_layer}. Nothing was trained on this update."
        )
    return IndexerReport(
        replayed, columns[SETS], columns[FLIPPED], columns[LOST], columns[CHANCE] / UNIT, by_layer
    ), fault


def both(positions: MisalignedError | None, experts: MisalignedError | None) -> MisalignedError | None:
    """One error of what is wrong with positions and with experts, which may be for one reason; None: nothing is."""
    if positions is None or experts is None:
        return positions or experts
    return MisalignedError(f"{positions}\nExperts of these tokens disagree, too, which may follow from it: {experts}")


def apart(lost_N: np.ndarray, chance_N: np.ndarray, sample_N: np.ndarray, keys: Sequence[int]) -> list[str]:
    """Samples of a forward that are apart, in words.

    Args:
        lost_N: `[N]` positions that each token lost, over all layers with an indexer.
        chance_N: `[N]` how many chance would lose; 0 for tokens that are not judged.
        sample_N: `[N]` place of its sample in `keys`.
        keys: of the samples.
    """
    judged_N = chance_N >= EVIDENCE
    usual = float(np.median(lost_N[judged_N] / chance_N[judged_N])) if judged_N.any() else 0.0
    apart_N = judged_N & (lost_N > (1 + min(usual, 1.0)) / 2 * chance_N)
    lines = []
    for place in np.unique(sample_N[apart_N]).tolist():
        number, of = int(apart_N[sample_N == place].sum()), int(judged_N[sample_N == place].sum())
        if number >= max(FEWEST, SHARE * of):
            lines.append(f"{name_of(keys[place])}: {number} of {of} tokens are apart")
    return lines
