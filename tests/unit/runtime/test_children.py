"""A task that is cancelled while it waits for a child process leaves when the child is gone."""

from __future__ import annotations

import asyncio

import pytest

from moe_trm.runtime.children import gone


def test_a_cancelled_task_leaves_no_child_behind() -> None:
    async def work() -> int | None:
        process = await asyncio.create_subprocess_exec("sleep", "1000")
        waiting = asyncio.ensure_future(gone(process))
        for _ in range(2):
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.sleep(0.01)
            assert not waiting.done()
        process.kill()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return process.returncode

    assert asyncio.run(work()) == -9
