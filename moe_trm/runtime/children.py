"""The end of child processes of an event loop."""

from __future__ import annotations

import asyncio
import signal
import time

from moe_trm.runtime.lifeline import signal_group

STOP_S = 2.0
"""Between the request to end (SIGTERM) and the end (SIGKILL)."""
POLL_S = 0.05
"""Between two looks at what is left of a group."""


async def gone(process: asyncio.subprocess.Process) -> None:
    """Wait until a process that was told to end is gone, also when the waiting task is cancelled meanwhile.

    Leaving earlier would leave pipes and an unattended child in the loop. A cancellation is raised after
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


async def end_group(group: int) -> None:
    """End a process group: it is asked to first, and killed after `STOP_S`, also when the waiting task is cancelled."""
    try:
        if signal_group(group, signal.SIGTERM):
            until = time.monotonic() + STOP_S
            while time.monotonic() < until and signal_group(group, 0):
                await asyncio.sleep(POLL_S)
    finally:
        signal_group(group, signal.SIGKILL)
