"""The process of a user's function: `python -m moe_trm.runtime.functions.worker CELL_DESCRIPTOR`, started by
`FunctionHost`.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
import types
from collections.abc import Coroutine, Generator
from typing import Any

import msgspec

from moe_trm.methods.load import load_function, place_in, place_of
from moe_trm.runtime.child_messages import Problem, problem
from moe_trm.runtime.child_service import CALL, Asker, serve
from moe_trm.runtime.functions.current_call import CurrentCall
from moe_trm.runtime.functions.hosted import FunctionSettings, FunctionTraits, Hosted

_NUM_LOGGED = 3
"""Tracebacks from different places that are written to standard error; then the function is known to fail."""


class _Late(Exception):
    """A call took longer than it may."""


class FunctionService:
    """Calls the function, and says in the shared cell whose code is being executed.

    Raises `ConfigError` where the function cannot be loaded.
    """

    def __init__(self, settings: FunctionSettings, current: CurrentCall) -> None:
        self._settings, self._current, self._logged = settings, current, set[str]()
        adapt = load_function(settings.adapter, key=settings.key)
        self._function = load_function(settings.function, key=settings.key)
        self._hosted: Hosted = adapt(self._function, settings)
        self.ready = FunctionTraits(self._hosted.batched, self._hosted.concurrent, place_of(self._function))

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let tasks that a call starts belong to it, and the cell show whose code runs."""
        loop.set_task_factory(self._marked)

    async def call(self, payload: Any, ask: Asker) -> Any:
        """See `Service.call`."""
        limit = asyncio.timeout(self._settings.limit_s)
        try:
            async with limit:
                return await self._hosted.call(payload, ask)
        except TimeoutError as error:
            if limit.expired():
                raise _Late from error
            raise

    def problem(self, error: BaseException) -> Problem:
        """See `Service.problem`."""
        if isinstance(error, _Late):
            return problem("timeout", f"nothing within {self._settings.limit_s:g} s")
        place = place_in(error, self._function)
        if place not in self._logged and len(self._logged) < _NUM_LOGGED:
            self._logged.add(place)
            traceback.print_exception(type(error), error, self._of_user(error))
        return problem("error", f"{type(error).__name__}: {error} ({place})")

    def _of_user(self, error: BaseException) -> types.TracebackType | None:
        """The traceback from the function's own file on; the whole where that is not in it."""
        file_name, frame = place_of(self._function).rpartition(":")[0], error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename != file_name:
            frame = frame.tb_next
        return frame or error.__traceback__

    def refusal(self, kind: str, text: str) -> Exception:
        """See `Service.refusal`."""
        return self._hosted.errors[kind](text)

    def _marked(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        context = options.get("context")
        number = context[CALL] if context is not None and CALL in context else CALL.get()
        driven = _driven(number, coroutine, self._current) if number else coroutine
        return asyncio.Task(driven, loop=loop, **options)


async def _driven(number: int, coroutine: Coroutine[Any, Any, Any], current: CurrentCall) -> Any:
    return await _stretches(number, coroutine, current)


@types.coroutine
def _stretches(number: int, coroutine: Coroutine[Any, Any, Any], current: CurrentCall) -> Generator[Any, Any, Any]:
    """Drive `coroutine` as `await` does, with the cell saying `number` while its code runs."""
    step, value = coroutine.send, None
    while True:
        current.begin(number)
        try:
            waits_for = step(value)
        except StopIteration as stop:
            return stop.value
        finally:
            current.end()
        try:
            step, value = coroutine.send, (yield waits_for)
        except BaseException as error:  # noqa: BLE001 (cancellation and errors belong to the coroutine)
            step, value = coroutine.throw, error


def main(descriptor: int) -> None:
    """Load the function that the first message names, and serve."""
    serve(lambda settings: FunctionService(msgspec.convert(settings, FunctionSettings), CurrentCall(descriptor)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
