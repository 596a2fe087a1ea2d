"""One rollout as its update saw it, token by token. Shape letters: T tokens of the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.types import RolloutRecord, TrainRow

Kind = Literal["prompt", "sampled", "given"]


@dataclass(frozen=True)
class Transcript:
    """One rollout of the first rank as its update saw it.

    Attributes:
        row: the record.
        advantage: mean over its scored tokens.
        ratio: the log-ratio shown: `engine`, or `merged` where engine and lag are not known apart.
        log_ratio, weight: `[T]` of each sampled token, None on all others and on sampled tokens that are not scored.
        keep: `[T]` whether the correction let it into the gradient, None likewise.
    """

    row: TrainRow
    advantage: float
    ratio: str
    log_ratio: Sequence[float | None]
    weight: Sequence[float | None]
    keep: Sequence[bool | None]

    @property
    def kinds(self) -> list[Kind]:
        """Kind of each token: part of the prompt, sampled by the policy, or given later (by a tool, a template)."""
        sampled = self.row.record.sampled
        first = int(sampled.argmax()) if sampled.any() else len(sampled)
        return [
            "sampled" if is_sampled else "prompt" if place < first else "given"
            for place, is_sampled in enumerate(sampled)
        ]


MAX_EXPECTED = 400
"""Characters of an expected answer that are shown."""


def name_of(record: RolloutRecord) -> str:
    """The sample, and its row where it has several."""
    several = any(turn.row > 0 for turn in record.session)
    return f"Sample {record.sample_id}" + (f", row {record.row}" if several else "")


def shortened(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= MAX_EXPECTED else f"{text[:MAX_EXPECTED]} ..."


def transcript(row: TrainRow, place: int, evidence: Evidence, correction: Correction) -> Transcript:
    """Row `place` of a judged micro-batch, token by token. Column `r` of the batch scores token `r + 1`."""
    ratio = evidence.ratios.known[0]
    width = row.record.num_tokens - 1
    scored = [False, *evidence.mask[place, :width].tolist()]

    def column(values: Sequence[float]) -> list[float | None]:
        return [value if is_scored else None for value, is_scored in zip([0.0, *values], scored, strict=True)]

    advantages = evidence.advantages[place][evidence.mask[place]].double()
    keep = [False, *correction.keep[place, :width].tolist()]
    return Transcript(
        row,
        float(advantages.mean()) if len(advantages) else 0.0,
        ratio,
        log_ratio=column(evidence.ratios.get(ratio)[place, :width].tolist()),
        weight=column(correction.weights[place, :width].tolist()),
        keep=[kept if is_scored else None for kept, is_scored in zip(keep, scored, strict=True)],
    )
