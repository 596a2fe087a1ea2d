"""Requests that come while the engine is paused: the scheduler takes them in, and computes them when it goes on.

SGLang's tokenizer manager keeps such requests itself, and sends them one by one once the pause ends. The first passes
after it then have few requests each. Its scheduler, which computes nothing while it is paused, can keep them as well.

It asks for new messages without a break during a pause. Here it waits for them, as when it is idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class Door(asyncio.Condition):
    """SGLang's condition under which requests go on to the scheduler: always, where that is paused itself.

    Attributes:
        kept_below: the scheduler is paused, and keeps what it is given.
    """

    kept_below = False

    async def wait_for(self, predicate: Callable[[], Any]) -> Any:
        """As of `asyncio.Condition`, unless the scheduler keeps the request."""
        return True if self.kept_below else await super().wait_for(predicate)


def open_door(native: Callable[[Any], None], manager: Any) -> None:
    """Around SGLang's `TokenizerManager.init_weight_update`: its condition is a `Door`."""
    native(manager)
    manager.is_pause_cond = Door()


async def pause(native: Callable[[Any, Any], Awaitable[None]], manager: Any, obj: Any) -> None:
    """Around SGLang's `TokenizerManager.pause_generation`. A pause of mode `abort` does not reach the scheduler."""
    manager.is_pause_cond.kept_below = False
    await native(manager, obj)
    manager.is_pause_cond.kept_below = obj.mode != "abort"


def wait(native: Callable[[Any], None], scheduler: Any) -> None:
    """Around what SGLang's paused scheduler does between two looks for messages: wait for the next one."""
    native(scheduler)
    scheduler.maybe_sleep_on_idle()


def register() -> None:
    """Let SGLang call these functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager, scheduler = "sglang.srt.managers.tokenizer_manager.TokenizerManager", "sglang.srt.managers.scheduler"
    HookRegistry.register(f"{manager}.init_weight_update", open_door, HookType.AROUND)
    HookRegistry.register(f"{manager}.pause_generation", pause, HookType.AROUND)
    paused_pass = f"{scheduler}.Scheduler._record_scheduler_state_for_paused_engine"
    HookRegistry.register(paused_pass, wait, HookType.AROUND)
