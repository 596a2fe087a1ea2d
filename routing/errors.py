"""Errors of the routing package. They stand alone: `routing` imports nothing of `moe_trm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from routing.flip_bound import Suspect
    from routing.replay import ReplayReport


class RouteError(ValueError):
    """A route record that violates an invariant.

    `reason` is a short stable word for counting: `shape`, `dtype`, `range`, `duplicate`, `layers`, `payload`, `digest`,
    `rows`.
    """

    def __init__(
        self, reason: str, what: str, *, where: str = "", got: object = None, expected: object = None, fix: str = ""
    ) -> None:
        self.reason, self.what, self.where, self.got, self.expected, self.fix = reason, what, where, got, expected, fix
        text = what + (f" ({where})" if where else "")
        if got is not None or expected is not None:
            text += f": got {got}"
        if expected is not None:
            text += f", expected {expected}"
        if fix:
            text += f". {fix}"
        super().__init__(text)


class ReplayProofError(RuntimeError):
    """A replayed forward did not use the recorded routes. The step must not be trained on."""


class FlipBoundError(ReplayProofError):
    """Every token used its recorded set, but these sets are too far from the live router's own choice.

    Attributes:
        suspects: the samples that stand out, the worst first.
        report: counters of the step.
        alike: no sample stands out of its batch, which is beyond the bound as a whole; `suspects` are the worst ones.
    """

    def __init__(self, what: str, suspects: Sequence[Suspect], report: ReplayReport, *, alike: bool = False) -> None:
        self.what, self.suspects, self.report, self.alike = what, tuple(suspects), report, alike
        listed = "".join(f"\n  {suspect}" for suspect in suspects[:5])
        more = f"\n  and {len(suspects) - 5} more" if len(suspects) > 5 else ""
        super().__init__(
            f"{what}. Rows or layers are misaligned, or the live router has moved since these samples were taken:"
            f"{listed}{more}"
        )


class MisalignedError(ReplayProofError):
    """Recorded routes that are not those of their tokens and layers, found on every rank at the same point."""


class ReplayRefusedError(ValueError):
    """Replay cannot work on this model or with this setting; the message says why and what to change."""
