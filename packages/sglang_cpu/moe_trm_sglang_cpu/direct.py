"""Requests whose answers come straight from the scheduler (`answers`), in the process with the connections.

SGLang's `generate_request` hands an answer through two generators and a task with a time limit, and sends each request
to the scheduler by itself. Here one coroutine waits for the bytes, and requests that come at once are sent together.
Their checks, their states and their end by an error are SGLang's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import orjson

from moe_trm_sglang_cpu.answers import PREFIX, Answers

DIRECT = "moe_trm_direct"
"""Attribute of SGLang's tokenizer manager with its `Direct`."""
SOON_S = 1e-3
"""Longest wait of a request for others: less than one pass of the scheduler."""
LOOK_S = 4.0
"""Pause between two looks for clients that have gone, as of SGLang."""

logger = logging.getLogger(__name__)


class Direct:
    """Answers requests for token ids.

    Args:
        manager: SGLang's tokenizer manager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager, self._numbers = manager, count()
        self._leaving: list[Any] = []
        self._clients: dict[str, Callable[[], Awaitable[bool]]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    def is_open(self) -> bool:
        """False while somebody else looks at every answer: SGLang hands them a whole one."""
        manager = self._manager
        return not (
            manager.enable_metrics
            or manager.enable_trace
            or manager.enable_lora
            or manager.dump_requests_folder
            or manager.crash_dump_folder
            or manager.request_logger.log_requests
            or manager.request_metrics_exporter_manager.exporter_enabled()
        )

    async def answer(self, obj: Any, has_gone: Callable[[], Awaitable[bool]]) -> bytes | dict[str, Any]:
        """The bytes of an answer; SGLang's own form of it where the scheduler sent that.

        Raises what SGLang's `generate_request` does, which this follows.

        Args:
            obj: SGLang's request, of one sample.
            has_gone: True once the client is no longer there.
        """
        manager = self._manager
        manager.auto_create_handle_loop()
        obj.rid = f"{PREFIX}{next(self._numbers):x}"
        obj.normalize_batch_and_arguments()
        manager._set_default_priority(obj)
        manager._init_req_state(obj, None)
        state = manager.rid_to_state[obj.rid]
        self._watch(obj.rid, has_gone)
        try:
            async with manager.is_pause_cond:
                await manager.is_pause_cond.wait_for(lambda: not manager.is_pause)
            async with manager.model_update_lock.reader_lock:
                self._send(await manager._tokenize_one_request(obj))
                await state.event.wait()
                return await self._ended(state)
        except BaseException:
            manager._release_req_states_on_failure({obj.rid: state})
            raise
        finally:
            self._clients.pop(obj.rid, None)

    async def _ended(self, state: Any) -> bytes | dict[str, Any]:
        out: bytes | dict[str, Any] | Exception = state.out_list[-1]
        if isinstance(out, Exception):
            raise out
        if isinstance(out, dict):
            # The end by an error has a status of its own.
            await self._manager._handle_abort_finish_reason(out, state, False)
        return out

    def _send(self, tokenized: Any) -> None:
        """Send it with all others that come soon."""
        if not self._leaving:
            asyncio.get_running_loop().call_later(SOON_S, self._begin_to_leave)
        self._leaving.append(tokenized)

    def _begin_to_leave(self) -> None:
        task = asyncio.ensure_future(self._leave())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _leave(self) -> None:
        manager = self._manager
        leaving, self._leaving = self._leaving, []
        # SGLang forgets a request whose client gave it up before it was sent, and never aborts it.
        batch = [tokenized for tokenized in leaving if tokenized.rid in manager.rid_to_state]
        if not batch:
            return
        try:
            if len(batch) == 1:
                await manager._send_one_request(batch[0])
            else:
                await manager._send_batch_request(batch)
        except Exception as error:  # noqa: BLE001 (whoever waits for an answer must be told)
            for tokenized in batch:
                state = manager.rid_to_state.get(tokenized.rid)
                if state is not None and not state.dispatched:
                    state.out_list.append(error)
                    state.event.set()

    def _watch(self, rid: str, has_gone: Callable[[], Awaitable[bool]]) -> None:
        self._clients[rid] = has_gone
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        """End the requests of clients that have gone, while there are any."""
        while self._clients:
            await asyncio.sleep(LOOK_S)
            for rid, has_gone in [*self._clients.items()]:
                if await has_gone() and self._clients.pop(rid, None) is not None:
                    self._manager.abort_request(rid)

    def receive(self, answers: Answers) -> None:
        """Give each answer to whoever waits for it."""
        for rid, body in zip(answers.rids, answers.bodies, strict=True):
            state = self._manager.rid_to_state.pop(rid, None)
            if state is None:
                logger.warning("Received output for rid=%r but the state was deleted in TokenizerManager.", rid)
                continue
            state.finished = True
            # A client that chose such an id itself waits for SGLang's form.
            state.out_list.append(body if rid in self._clients else orjson.loads(body))
            state.event.set()


def open_door(native: Callable[[Any], None], manager: Any) -> None:
    """Around SGLang's `TokenizerManager.init_request_dispatcher`: it knows a `Direct`."""
    native(manager)
    direct = Direct(manager)
    setattr(manager, DIRECT, direct)
    dispatcher = manager._result_dispatcher
    dispatcher += type(dispatcher)([(Answers, direct.receive)])


def register() -> None:
    """Let SGLang call `open_door`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_request_dispatcher"
    HookRegistry.register(target, open_door, HookType.AROUND)
