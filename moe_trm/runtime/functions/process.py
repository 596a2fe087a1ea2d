"""The running process of a user's function."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import msgspec

from moe_trm.errors import ConfigError, MoeTrmError
from moe_trm.runtime.child import Answerer, CallFailed, Child, NotStarted
from moe_trm.runtime.child_messages import error_of
from moe_trm.runtime.functions.current_call import SIZE, CurrentCall
from moe_trm.runtime.functions.hosted import FunctionSettings, FunctionTraits

STARTUP_S = 120.0
"""Limit for importing the function's module."""


class FunctionFailed(MoeTrmError):
    """A call did not end well.

    `reason`: `error` (it raised), `timeout`, `type` (it returned what cannot be sent) or `crash` (its process ended).
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Process:
    """A child that runs one function.

    Attributes:
        traits: of the function.
    """

    def __init__(self, child: Child, current: CurrentCall) -> None:
        self._child, self._current = child, current
        self.traits = msgspec.convert(child.ready, FunctionTraits)

    @classmethod
    async def start(cls, settings: FunctionSettings) -> Process:
        """A process that has loaded the function. Raises `ConfigError`."""
        with tempfile.TemporaryFile() as cell:
            os.ftruncate(cell.fileno(), SIZE)
            current = CurrentCall(cell.fileno())
            try:
                child = await Child.start(
                    "moe_trm.runtime.functions.worker",
                    settings,
                    descriptor=cell.fileno(),
                    startup_s=STARTUP_S,
                    limit_s=settings.limit_s,
                    running=current.read,
                )
            except BaseException as error:
                current.close()
                if isinstance(error, NotStarted):
                    raise _refusal(error, settings) from error
                raise
        return cls(child, current)

    @property
    def ended(self) -> bool:
        """It takes no calls any more."""
        return self._child.ended.is_set()

    async def call(self, payload: Any, answer: Answerer | None) -> Any:
        """See `Child.call`. Raises `FunctionFailed`, `ChildEnded`, and whatever the answerer raised but `Refused`."""
        try:
            return await self._child.call(payload, answer)
        except CallFailed as failure:
            raise FunctionFailed(failure.problem.kind, failure.problem.what) from failure

    async def close(self) -> None:
        """End it and release what belongs to it."""
        await self._child.close()
        self._current.close()


def _refusal(error: NotStarted, settings: FunctionSettings) -> MoeTrmError:
    reported = error_of(error.problem, {"ConfigError": ConfigError}) if error.problem is not None else None
    return reported or ConfigError(
        "the function's process did not start",
        where=f"config key {settings.key}",
        got=f"{settings.function}: {error}",
        expected=f"its module imported within {STARTUP_S:g} s",
    )
