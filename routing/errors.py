"""Errors of the routing package. They stand alone: `routing` imports nothing of `moe_trm`."""

from __future__ import annotations


class RouteError(ValueError):
    """A route record that violates an invariant.

    `reason` is a short stable word for counting: `shape`, `dtype`, `range`, `duplicate`, `layers`, `payload`, `digest`,
    `rows`, `positions`.
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


class MisalignedError(ReplayProofError):
    """Recorded routes that do not belong to their tokens and layers, found on every rank at the same point."""


class ReplayRefusedError(ValueError):
    """Replay cannot work on this model or with this setting; the message says why and what to change."""
