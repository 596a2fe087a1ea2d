"""The end of child processes of an event loop."""

from __future__ import annotations

import asyncio


async def gone(process: asyncio.subprocess.Process) -> None:
    """Wait until a process that was told to end is gone, also when the waiting task is cancelled meanwhile.

    Who leaves earlier leaves the loop with pipes and a child that nobody looks after. A cancellation is raised after
    the end.
    """
    waiting, cancelled = asyncio.ensure_future(process.wait()), None
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
