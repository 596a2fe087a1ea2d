"""One answer of an audit: a question, the cause that was found, its evidence, and what would have been found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launch.start.checks import Check, Status

FEW = 5
"""Names that a sentence lists."""


@dataclass(frozen=True)
class AuditAnswer:
    """The answer of the evidence to one question.

    Attributes:
        question: what was examined.
        cause: a word for it; `none` where nothing was found, `open` where the dump cannot answer.
        status: `fail`: results of the run are wrong; `warn`: look at it; `ok`; `skip`: not examined.
        sentence: the evidence.
        fix: what to change, in the words of the framework; empty when nothing.
        tokens, judged: tokens that show it, and tokens that were examined.
        rows: names of the rows that show it.
        figures: numbers that the sentence rests on.
        excluded: what would have been found, and how surely.
    """

    question: str
    cause: str
    status: Status
    sentence: str
    fix: str = ""
    tokens: int = 0
    judged: int = 0
    rows: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    excluded: str = ""

    @property
    def check(self) -> Check:
        """The answer as a line of the terminal."""
        affected = f" {self.tokens} of {self.judged} tokens ({self.tokens / self.judged:.1%})." if self.tokens else ""
        named = f" Rows: {listed(self.rows)}." if self.rows else ""
        excluded = f"\n{self.excluded}" if self.excluded else ""
        title = self.question if self.cause in ("none", "open") else f"{self.question}: {self.cause}"
        return Check(title, self.status, f"{self.sentence}{affected}{named}{excluded}", self.fix)


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return "; ".join(names[:FEW]) + more
