"""A child process: what one call does wrong is its own, and every call ends once."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from moe_trm.errors import ConfigError, RecordRejected
from moe_trm.runtime.child import Child, ChildEnded, NotStarted
from moe_trm.runtime.child_messages import error_of, problem_of
from moe_trm.runtime.functions.host import FunctionHost
from moe_trm.runtime.functions.process import FunctionFailed

T = TypeVar("T")
CHILD = "tests.unit.runtime.sleeping_child"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
"""Children do not look for modules in their working folder."""
SOURCE = """
import asyncio, os, signal
from moe_trm.runtime.functions.hosted import Hosted

def adapt(function, settings):
    async def call(payload, ask):
        return await function(payload, ask)
    return Hosted(call, errors={"usage": ValueError})

class Mute(Exception):
    def __str__(self):
        raise RuntimeError

async def run(payload, ask):
    match payload["do"]:
        case "surrogate": raise ValueError(chr(0xD800))
        case "mute": raise Mute
        case "return": return eval(payload["value"])
        case "ask": return await ask("get", {"name": "x"})
        case "pid": return os.getpid()
        case "sleep": await asyncio.sleep(payload["seconds"])
        case "wait":
            while not os.path.exists(payload["path"]): await asyncio.sleep(0.01)
    return "slept"
"""


def with_host(folder: Path, work: Callable[[FunctionHost], Awaitable[T]], limit_s: float = 60.0) -> T:
    path = folder / "child_function.py"
    path.write_text(SOURCE)

    async def run() -> T:
        host = FunctionHost(f"{path}:run", adapter=f"{path}:adapt", key="task.reward", limit_s=limit_s)
        try:
            return await asyncio.wait_for(work(host), 200)
        finally:
            await host.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"do": "surrogate"}, "error"),
        ({"do": "mute"}, "error"),
        ({"do": "return", "value": "chr(0xd800)"}, "type"),
        ({"do": "return", "value": "object()"}, "type"),
        ({"do": "nothing", "text": "\ud800"}, "type"),
        ({"do": "ask"}, "type"),
    ],
)
def test_what_cannot_be_sent_fails_its_own_call_at_once(tmp_path: Path, payload: dict[str, Any], reason: str) -> None:
    """Nobody waits for the limit, the process stays, and so do the calls beside it."""

    async def answer(op: str, arguments: dict[str, Any]) -> str:
        return "\ud800"

    async def work(host: FunctionHost) -> tuple[Any, ...]:
        pid = await host.call({"do": "pid"})
        beside = asyncio.ensure_future(host.call({"do": "sleep", "seconds": 0.5}))
        with pytest.raises(FunctionFailed) as caught:
            await host.call(payload, lambda: answer)
        return caught.value.reason, await beside, pid == await host.call({"do": "pid"})

    assert with_host(tmp_path, work, 1000.0) == (reason, "slept", True)


def test_a_process_that_stands_still_at_a_deadline_does_not_take_the_others_along(tmp_path: Path) -> None:
    """As on a machine that stalls: nobody is held to be deaf before the process goes on."""
    free = tmp_path / "free"

    async def work(host: FunctionHost) -> tuple[list[Any], bool]:
        pid = await host.call({"do": "pid"})
        process = host._process
        assert process is not None
        calls = [asyncio.ensure_future(host.call({"do": "wait", "path": str(free)})) for _ in range(8)]
        while process._child.num_open < len(calls):
            await asyncio.sleep(0.01)
        await host.call({"do": "pid"})  # all of them have begun
        os.kill(pid, signal.SIGSTOP)
        late = next(iter(process._child._open.values()))
        late.deadline = 0.0
        while late.rounds is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # several looks
        assert not process.ended
        free.touch()
        os.kill(pid, signal.SIGCONT)
        return await asyncio.gather(*calls), pid == await host.call({"do": "pid"})

    assert with_host(tmp_path, work) == (["slept"] * 8, True)


def test_calls_of_a_process_that_dies_end() -> None:
    async def run() -> bool:
        with tempfile.TemporaryFile() as cell:
            child = await Child.start(CHILD, {}, descriptor=cell.fileno(), startup_s=200.0, environment=ENVIRONMENT)
            try:
                calls = [asyncio.ensure_future(child.call(number)) for number in range(3)]
                await asyncio.sleep(0)
                os.kill(child.process_id, signal.SIGKILL)
                ends = await asyncio.gather(*calls, return_exceptions=True)
                assert all(isinstance(end, ChildEnded) for end in ends)
                with pytest.raises(ChildEnded):
                    await child.call(4)
            finally:
                await child.close()
            return child.num_open == 0

    assert asyncio.run(run())


def test_a_value_that_nobody_waits_for_is_taken_too() -> None:
    """It may stand for memory, which somebody has to give back."""
    taken: list[Any] = []

    def take(value: Any) -> Any:
        taken.append(value)
        return value

    async def run() -> None:
        with tempfile.TemporaryFile() as cell:
            child = await Child.start(
                CHILD,
                {"deaf": True},
                descriptor=cell.fileno(),
                startup_s=200.0,
                environment=ENVIRONMENT,
                take=take,
            )
            try:
                call = asyncio.ensure_future(child.call("first"))
                await child.call("second")
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                end = time.monotonic() + 200
                while "first" not in taken and time.monotonic() < end:
                    await asyncio.sleep(0.05)
            finally:
                await child.close()

    asyncio.run(run())
    assert taken == ["second", "first"]


def test_a_child_that_refuses_to_begin_says_why() -> None:
    async def run() -> None:
        with tempfile.TemporaryFile() as cell:
            await Child.start(
                CHILD,
                {"refuse": "no such thing"},
                descriptor=cell.fileno(),
                startup_s=200,
                environment=ENVIRONMENT,
            )

    with pytest.raises(NotStarted) as caught:
        asyncio.run(run())
    assert caught.value.problem is not None
    error = error_of(caught.value.problem, {"ConfigError": ConfigError})
    assert isinstance(error, ConfigError)
    assert error.what == "no such thing"


def test_an_error_is_the_same_on_the_other_side() -> None:
    error = RecordRejected("route_rows", "wrong", where="sample 1", got=3, expected=4, fix="look \udc80")
    again = error_of(problem_of(error), {"RecordRejected": RecordRejected})
    assert isinstance(again, RecordRejected)
    assert (again.reason, again.got, again.fix) == ("route_rows", "3", r"look \udc80")
    assert error_of(problem_of(error), {}) is None
