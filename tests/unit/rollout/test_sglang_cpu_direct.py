"""The CPU support package waits for answers that come straight from the scheduler; SGLang has every other case."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu import direct
from moe_trm_sglang_cpu.answers import PREFIX, Answers
from moe_trm_sglang_cpu.direct import Direct


class Refused(Exception):
    """SGLang's refusal of a request."""


class Manager:
    """The parts of SGLang's tokenizer manager that a request passes."""

    def __init__(self) -> None:
        self.enable_metrics = self.enable_trace = self.enable_lora = False
        self.dump_requests_folder = self.crash_dump_folder = ""
        self.request_logger = SimpleNamespace(log_requests=False)
        self.exports, self.is_pause = False, False
        self.request_metrics_exporter_manager = SimpleNamespace(exporter_enabled=lambda: self.exports)
        self.rid_to_state: dict[str, Any] = {}
        self.sent: list[list[str]] = []
        self.aborted: list[str] = []
        self.refusal: Exception | None = None
        self.broken: Exception | None = None
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = SimpleNamespace(reader_lock=self)

    def auto_create_handle_loop(self) -> None: ...

    def _set_default_priority(self, obj: Any) -> None: ...

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...

    def _init_req_state(self, obj: Any, request: object) -> None:
        self.rid_to_state[obj.rid] = SimpleNamespace(
            out_list=[], finished=False, event=asyncio.Event(), obj=obj, dispatched=False
        )

    async def _tokenize_one_request(self, obj: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return SimpleNamespace(rid=obj.rid)

    async def _send_one_request(self, tokenized: Any) -> None:
        await self._send_batch_request([tokenized])

    async def _send_batch_request(self, batch: list[Any]) -> None:
        if self.broken is not None:
            raise self.broken
        self.sent.append([tokenized.rid for tokenized in batch])
        for tokenized in batch:
            self.rid_to_state[tokenized.rid].dispatched = True

    async def _handle_abort_finish_reason(self, out: dict[str, Any], state: Any, stream: bool) -> None:
        if "status_code" in out["meta_info"]["finish_reason"]:
            raise Refused(out["meta_info"]["finish_reason"]["message"])

    def _release_req_states_on_failure(self, states: dict[str, Any]) -> None:
        for rid in states:
            if self.rid_to_state.pop(rid, None) is not None and states[rid].dispatched:
                self.aborted.append(rid)

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)

    def ends(self, rid: str, out: dict[str, Any]) -> None:
        """What SGLang's handlers do with an answer of another form."""
        state = self.rid_to_state.pop(rid)
        state.finished = True
        state.out_list.append(out)
        state.event.set()


def request() -> Any:
    return SimpleNamespace(rid=None, normalize_batch_and_arguments=lambda: None)


async def stays() -> bool:
    return False


def rid(number: int) -> str:
    return f"{PREFIX}{number:x}"


def run(work: Callable[[Manager, Direct], Awaitable[None]]) -> None:
    async def start() -> None:
        manager = Manager()
        await work(manager, Direct(manager))

    asyncio.run(start())


def asks(way: Direct, count: int) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(way.answer(request(), stays)) for _ in range(count)]


async def turns() -> None:
    await asyncio.sleep(10 * direct.SOON_S)


def test_requests_that_come_at_once_are_sent_together_and_get_their_own_answers() -> None:
    async def work(manager: Manager, way: Direct) -> None:
        tasks = asks(way, 3)
        await turns()
        tasks += asks(way, 1)
        await turns()
        assert manager.sent == [[rid(0), rid(1), rid(2)], [rid(3)]]
        way.receive(Answers([rid(3), rid(1)], [b"d", b"b"]))
        assert [await tasks[3], await tasks[1]] == [b"d", b"b"]
        assert not tasks[0].done()
        way.receive(Answers([rid(0), rid(2), "nobody"], [b"a", b"c", b"x"]))
        assert [await tasks[0], await tasks[2]] == [b"a", b"c"]
        assert not manager.rid_to_state
        assert not manager.aborted
        assert not way._clients, "clients that have their answer"

    run(work)


def test_an_answer_of_sglang_is_handed_on_and_its_refusal_is_raised() -> None:
    async def work(manager: Manager, way: Direct) -> None:
        tasks = asks(way, 2)
        await turns()
        aborted = {"meta_info": {"finish_reason": {"type": "abort"}}}
        manager.ends(rid(0), aborted)
        manager.ends(rid(1), {"meta_info": {"finish_reason": {"status_code": 400, "message": "too long"}}})
        assert await tasks[0] == aborted
        with pytest.raises(Refused, match="too long"):
            await tasks[1]

    run(work)


def test_a_refused_request_is_not_sent_and_leaves_nothing() -> None:
    async def work(manager: Manager, way: Direct) -> None:
        manager.refusal = Refused("a token outside of the vocabulary")
        with pytest.raises(Refused, match="vocabulary"):
            await asks(way, 1)[0]
        assert not manager.rid_to_state
        assert not manager.sent

    run(work)


def test_a_request_that_was_given_up_before_it_left_is_not_sent_and_the_others_are() -> None:
    async def work(manager: Manager, way: Direct) -> None:
        tasks = asks(way, 2)
        await asyncio.sleep(0)
        tasks[0].cancel()
        await turns()
        assert manager.sent == [[rid(1)]]
        way.receive(Answers([rid(1)], [b"b"]))
        assert await tasks[1] == b"b"
        asks(way, 1)[0].cancel()
        alone = asks(way, 1)[0]
        await asyncio.sleep(0)
        alone.cancel()
        await turns()
        assert manager.sent == [[rid(1)]]

    run(work)


def test_everyone_hears_of_a_message_that_could_not_be_sent() -> None:
    async def work(manager: Manager, way: Direct) -> None:
        manager.broken = Refused("no scheduler")
        for outcome in await asyncio.gather(*asks(way, 2), return_exceptions=True):
            assert isinstance(outcome, Refused)
        assert not manager.rid_to_state

    run(work)


def test_a_request_that_has_left_waits_for_its_answer_whatever_comes_after() -> None:
    async def work(manager: Manager, way: Direct) -> None:
        native = manager._send_batch_request

        async def fails_late(batch: list[Any]) -> None:
            await native(batch)
            raise Refused("after it was sent")

        manager._send_batch_request = fails_late  # type: ignore[method-assign]
        [task] = asks(way, 1)
        await turns()
        assert not task.done()
        way.receive(Answers([rid(0)], [b"a"]))
        assert await task == b"a"

    run(work)


def test_whoever_no_longer_waits_ends_the_request() -> None:
    async def work(manager: Manager, way: Direct) -> None:
        [task] = asks(way, 1)
        await turns()
        task.cancel()
        await turns()
        assert manager.sent == [[rid(0)]]
        assert manager.aborted == [rid(0)]

    run(work)


def test_a_client_that_has_gone_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "LOOK_S", 0.01)
    gone = [False, False]

    async def work(manager: Manager, way: Direct) -> None:
        async def has_gone(number: int) -> bool:
            return gone[number]

        for _ in range(2):  # there is one who looks again after nobody was there
            manager.aborted.clear()
            first = len(manager.sent) * 2
            tasks = [
                asyncio.ensure_future(way.answer(request(), lambda number=number: has_gone(number)))
                for number in range(2)
            ]
            await asyncio.sleep(0.05)
            assert not manager.aborted
            gone[1] = True
            await asyncio.sleep(0.05)
            assert manager.aborted == [rid(first + 1)]
            gone[1] = False
            for number in range(2):
                manager.ends(rid(first + number), {"meta_info": {"finish_reason": {}}})
            await asyncio.gather(*tasks)
            await asyncio.sleep(0.05)

    run(work)


def test_a_client_that_chose_such_an_id_itself_gets_the_form_of_sglang() -> None:
    async def work(manager: Manager, way: Direct) -> None:
        manager._init_req_state(SimpleNamespace(rid=rid(9)), None)
        state = manager.rid_to_state[rid(9)]
        way.receive(Answers([rid(9)], [b'{"output_ids": [4]}']))
        assert (state.out_list, state.finished, state.event.is_set()) == ([{"output_ids": [4]}], True, True)

    run(work)


@pytest.mark.parametrize(
    "name", ["enable_metrics", "enable_trace", "enable_lora", "dump_requests_folder", "crash_dump_folder", "exports"]
)
def test_whole_answers_are_made_for_whoever_else_looks_at_them(name: str) -> None:
    manager = Manager()
    assert Direct(manager).is_open()
    setattr(manager, name, "x")
    assert not Direct(manager).is_open()


def test_whole_answers_are_made_for_the_log() -> None:
    manager = Manager()
    manager.request_logger.log_requests = True
    assert not Direct(manager).is_open()


class Dispatcher:
    """SGLang's: a function for each type of message."""

    def __init__(self, pairs: list[tuple[type, Callable[[Any], Any]]]) -> None:
        self.known = dict(pairs)

    def __iadd__(self, other: Dispatcher) -> Dispatcher:
        self.known |= other.known
        return self


def test_a_manager_knows_its_direct_way() -> None:
    manager: Any = SimpleNamespace(rid_to_state={})

    def native(manager: Any) -> None:
        manager._result_dispatcher = Dispatcher([(int, str)])

    direct.open_door(native, manager)
    way = getattr(manager, direct.DIRECT)
    assert isinstance(way, Direct)
    assert manager._result_dispatcher.known == {int: str, Answers: way.receive}
