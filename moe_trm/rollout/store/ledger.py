"""State of every issued sample. The totals must balance at every step: nothing is lost, nothing counted twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ledger:
    """`issued = queued + in_flight + trained + rejected + dropped`.

    A sample is trained when it is in a step for the first time; `reused` counts further uses, beside these places.
    Counted by reason: rejected ones violated an invariant, dropped ones are valid, but refused by policy, such as age.
    """

    issued: int = 0
    in_flight: int = 0
    queued: int = 0
    trained: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    reused: int = 0

    def issue(self) -> None:
        self.issued += 1
        self.in_flight += 1

    def reject(self, reason: str) -> None:
        self.in_flight -= 1
        self.rejected[reason] += 1

    def queue(self) -> None:
        self.in_flight -= 1
        self.queued += 1

    def reuse(self, count: int) -> None:
        """Samples that were trained before are trained once more. They stay where they are in the books."""
        self.reused += count

    def drop(self, reason: str) -> None:
        self.queued -= 1
        self.dropped[reason] += 1

    def train(self) -> None:
        self.queued -= 1
        self.trained += 1

    @property
    def balanced(self) -> bool:
        places = (self.in_flight, self.queued, self.trained, self.rejected.total(), self.dropped.total())
        return min(places) >= 0 and sum(places) == self.issued

    def settled(self) -> dict[str, Any]:
        """The books as plain data, without what is in flight or queued: a resumed run issues that again."""
        return {
            "issued": self.issued - self.in_flight - self.queued,
            "trained": self.trained,
            "reused": self.reused,
            "rejected": dict(self.rejected),
            "dropped": dict(self.dropped),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the books of `settled`."""
        self.issued, self.trained = state["issued"], state["trained"]
        self.reused = state.get("reused", 0)  # older checkpoints have none
        self.rejected, self.dropped = Counter(state["rejected"]), Counter(state["dropped"])

    def metrics(self) -> Mapping[str, float]:
        """`ledger/*` totals since the start, and one `records/rejected/*` or `records/dropped/*` per reason met."""
        totals = {
            "issued": self.issued,
            "in_flight": self.in_flight,
            "queued": self.queued,
            "trained": self.trained,
            "rejected": self.rejected.total(),
            "dropped": self.dropped.total(),
        }
        reasons = {f"records/rejected/{reason}": float(n) for reason, n in sorted(self.rejected.items())}
        reasons |= {f"records/dropped/{reason}": float(n) for reason, n in sorted(self.dropped.items())}
        return {f"ledger/{name}": float(n) for name, n in totals.items()} | reasons
