"""The words of a verdict: its case, sentence, figures and setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Case = Literal[
    "ok",
    "labels",
    "routes",
    "precision",
    "outlier",
    "records",
    "unsplit",
    "lag",
    "staleness",
    "masking",
    "variance",
    "sequence",
    "drift",
    "bias",
    "router",
    "clipping",
    "length",
    "gradient",
    "signal",
    "learned",
    "reward",
    "servers",
    "stalled",
    "jump",
    "unclear",
]


REPEATS = 3
"""Steps that must agree on what would be true of all steps of a server, or as many as there are."""


@dataclass(frozen=True)
class Verdict:
    """Judgement of a run's metrics.

    Attributes:
        case: the first case of the decision tree that holds.
        sentence: the case in words.
        evidence: the metrics it rests on.
        config: the setting that acts on it, as typed on the command line; empty when nothing should change.
    """

    case: Case
    sentence: str
    evidence: Mapping[str, float]
    config: str


def pick(seen: Mapping[str, float], *names: str) -> dict[str, float]:
    """Those of `names` that were measured."""
    return {name: seen[name] for name in names if name in seen}
