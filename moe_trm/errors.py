"""Typed errors. Each names the fault, the place, the value found, the value expected, and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Checked = TypeVar("Checked")

REFUSED = 2
"""Exit status of a process that met an error which would only repeat, so it is not started again automatically."""


class MoeTrmError(Exception):
    """Base of every error a user can meet.

    Args:
        what: the fact, in one clause ("expert id out of range").
        where: the place in the user's terms ("sample 17, row 4, layer 2", "config key replay.mode").
        got: the offending value, as it was.
        expected: what would have been accepted.
        fix: what the user can do now.
    """

    may_pass: bool = False
    """The same run, started again, may get further: a server or a process was lost. Everything else can only repeat."""

    def __init__(
        self, what: str, *, where: str = "", got: object = None, expected: object = None, fix: str = ""
    ) -> None:
        self.what, self.where, self.got, self.expected, self.fix = what, where, got, expected, fix
        lines = [what + (f" ({where})" if where else "")]
        if got is not None or expected is not None:
            lines.append("  got:      " + str(got).replace("\n", "\n            "))
        if expected is not None:
            lines.append(f"  expected: {expected}")
        if fix:
            lines.append(f"  do:       {fix}")
        super().__init__("\n".join(lines))

    @property
    def exit_status(self) -> int:
        """Exit status of a process that this error ends."""
        return 1 if self.may_pass else REFUSED


class ConfigError(MoeTrmError):
    """A config key, value or combination that cannot work; raised before anything is loaded."""


class CheckpointError(MoeTrmError):
    """A checkpoint folder that is missing, incomplete, or does not fit the model or the tokenizer."""


class EngineError(MoeTrmError):
    """The rollout engine cannot be started or reached, or answered with an error."""

    may_pass = True


class EngineLost(EngineError):
    """The engine did not answer, or answered with server errors (5xx) only.

    The request may be repeated, here or elsewhere.
    """


class RecordRejected(MoeTrmError):
    """One rollout record violates an invariant. Counted under `reason`; the run goes on without the record."""

    def __init__(
        self, reason: str, what: str, *, where: str = "", got: object = None, expected: object = None, fix: str = ""
    ) -> None:
        super().__init__(what, where=where, got=got, expected=expected, fix=fix)
        self.reason = reason


class FalseRecords(MoeTrmError):
    """More records of a step are not what they claim to be than single failures explain; none of them was trained."""


class LearnerError(MoeTrmError):
    """The learner was asked for something that it does not hold."""


class ReplicaError(MoeTrmError):
    """Learner ranks hold different values of a tensor that is the same on all of them, or gradients of other norms."""


class SyncError(MoeTrmError):
    """A weight push is incomplete or wrong: the engine's checksums differ from those of the sent tensors."""

    may_pass = True


class BundleError(MoeTrmError):
    """A recorded bundle is damaged, truncated, or of another format version."""


class ControllerError(MoeTrmError):
    """The rollout controller died, refused a request, or broke the wire protocol.

    `may_pass` as of what ended or refused.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        got: object = None,
        expected: object = None,
        fix: str = "",
        may_pass: bool = False,
    ) -> None:
        super().__init__(what, where=where, got=got, expected=expected, fix=fix)
        self.may_pass = may_pass


class ControllerLeaving(ControllerError):
    """The controller was asked to end with its ranks. It refuses what is not finished, so that they save and end."""


class RunError(MoeTrmError):
    """A folder without a run, a run without results yet, or a run that cannot write its files."""


class SeveralRefusals(ConfigError):
    """Several independent reasons why a run cannot start; `reasons` has them one by one."""

    def __init__(self, reasons: list[MoeTrmError]) -> None:
        self.reasons = tuple(reasons)
        lines = "".join(
            f"\n  {number}. " + str(reason).replace("\n", "\n   ") for number, reason in enumerate(reasons, 1)
        )
        super().__init__(f"the run cannot start, for {len(reasons)} reasons:{lines}")


def refuse_together(*checks: Callable[[], Checked]) -> list[Checked]:
    """The results of all checks; else raise the error of the one that fails, or `SeveralRefusals`.

    A reason that several checks give is given once.
    """
    results, reasons = [], list[MoeTrmError]()
    for check in checks:
        try:
            results.append(check())
        except MoeTrmError as error:
            reasons.append(error)
    different = list({str(reason): reason for reason in reversed(reasons)}.values())[::-1]
    if len(different) > 1:
        raise SeveralRefusals(different)
    if different:
        raise different[0]
    return results
