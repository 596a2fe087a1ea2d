"""Bodies enter one after the other where memory is short, and nobody is overtaken or forgotten."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from fcntl import ioctl
from termios import FIONREAD

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.errors import EngineLost
from moe_trm.rollout.intake.exchange import Exchange
from moe_trm.rollout.intake.receiving import Reception, Room
from moe_trm.rollout.servers.http import EngineSlow, HttpStatusError
from tests.unit.rollout.local_app import LocalApp


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3), st.booleans()), max_size=20),
    st.integers(1, 20),
)
def test_room_is_never_exceeded_but_by_one_alone(visits: list[tuple[int, int, bool]], size: int) -> None:
    async def run() -> None:
        room, inside, entered = Room(size), list[int](), list[int]()

        async def visit(number: int, own: int, turns: int) -> None:
            await room.enter(own)
            entered.append(number)
            inside.append(own)
            try:
                assert sum(inside) == room.taken
                assert sum(inside) <= size or inside == [own]
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                inside.remove(own)
                room.leave(own)

        tasks = [asyncio.ensure_future(visit(number, own, turns)) for number, (own, turns, _) in enumerate(visits)]
        await asyncio.sleep(0)
        for task, (_, _, leaves) in zip(tasks, visits, strict=True):
            if leaves:
                task.cancel()
        for _ in range(1000):
            await asyncio.sleep(0)
        waiting = [task for task in tasks if not task.done()]
        for task in waiting:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert not waiting, "somebody waits though the room is empty"
        assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        assert entered == sorted(entered)
        assert {number for number, (_, _, leaves) in enumerate(visits) if not leaves} <= {*entered}
        assert room.taken == 0

    asyncio.run(run())


class Bodies(LocalApp):
    """Answers with so many bytes; in chunks of unknown number, if `chunked`."""

    def __init__(self, size: int, *, chunked: bool = False, status: int = 200) -> None:
        self.size, self.chunked, self.status, self.cut = size, chunked, status, False

    def routes(self) -> Sequence[web.RouteDef]:
        return [web.post("/generate", self._generate)]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=self.status)
        if not self.chunked:
            response.content_length = self.size
        await response.prepare(request)
        await response.write(b"x" * (self.size // 2))
        if self.cut:
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(b"x" * (self.size - self.size // 2))
        await response.write_eof()
        return response


def received(app: Bodies, room: Room, *, timeout_s: float = 100.0) -> int:
    async def run() -> int:
        await app.start()
        try:
            reception = Reception(app.url, {}, room, timeout_s=timeout_s, max_attempts=2)
            try:
                body = await reception.answer("/generate", {})
                assert bytes(body) == b"x" * app.size
                return len(body)
            finally:
                assert room.taken in (app.size, 0) or app.chunked
                reception.leave()
        finally:
            await app.stop()

    return asyncio.run(run())


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [0, 1, 1000, 3_000_000])
def test_a_body_is_received_whole_and_its_room_given_back(size: int, chunked: bool) -> None:
    room = Room(100)
    assert received(Bodies(size, chunked=chunked), room) == size
    assert room.taken == 0
    assert chunked or room.most_taken == size


def test_a_body_that_ends_early_is_an_error_and_leaves_no_room_taken() -> None:
    app, room = Bodies(1000), Room(100)
    app.cut = True
    with pytest.raises(EngineLost):
        received(app, room)
    assert room.taken == 0


def test_a_refusal_is_told_with_its_status() -> None:
    room = Room(100)
    with pytest.raises(HttpStatusError) as caught:
        received(Bodies(10, status=404), room)
    assert (caught.value.status, room.taken) == (404, 0)


def test_a_server_that_says_nothing_is_slow() -> None:
    class Silent(Bodies):
        async def _generate(self, request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(3600)
            raise AssertionError

    with pytest.raises(EngineSlow):
        received(Silent(1), Room(100), timeout_s=0.2)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_part_of_a_body_does_not_wake_the_process(chunked: bool) -> None:
    async def run() -> bytes:
        peers = asyncio.Queue[asyncio.StreamWriter]()
        server = await asyncio.start_server(lambda _, writer: peers.put_nowait(writer), "127.0.0.1", 0)
        exchange = Exchange(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/generate")
        asked = asyncio.ensure_future(exchange.ask("POST", {}, b""))
        peer = await peers.get()
        peer.write(OK + (b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n" if chunked else b"Content-Length: 1000\r\n\r\n"))
        body = asyncio.ensure_future(exchange.body(await asked, lambda size: memoryview(bytearray(size))))
        await _turns()
        peer.write(b"x" * 999)
        await _turns()
        assert exchange._socket is not None
        unread = array("i", [0])
        ioctl(exchange._socket, FIONREAD, unread)
        peer.write(b"x\r\n" if chunked else b"x")
        await _turns()
        if chunked:
            peer.write(b"0\r\n\r\n")
        async with asyncio.timeout(60):
            whole = bytes(await body)
        for end in (exchange, peer, server):
            end.close()
        assert unread[0] == 999
        return whole

    assert asyncio.run(run()) == b"x" * 1000


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (OK + b"Content-Length: 3\r\n\r\nabc", b"abc"),
        (OK + b"content-length:3\r\nX: y\r\n\r\nabcdef", b"abc"),
        (OK + b"\r\nuntil the end", b"until the end"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n", b"abc"),
        (OK + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nxy\r\nab", "no chunk"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", "ended after"),
        (OK + b"Content-Length: 4\r\n\r\nabc", "ended after 3 of 4 bytes"),
        (OK + b"Content-Length: -4\r\n\r\nabc", "no HTTP answer"),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", "encoded: gzip"),
        (b"SSH-2.0-x\r\n\r\n", "no HTTP answer"),
        (b"HTTP/1.1 huh\r\n\r\n", "no HTTP answer"),
        (OK + b"x" * 300_000, "too long"),
        (OK, "closed the connection"),
        (b"", "closed the connection"),
    ],
)
def test_what_is_http_is_read_and_what_is_not_is_refused(raw: bytes, expected: bytes | str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    async def run() -> bytes:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        room = Room(100)
        reception = Reception(url, {}, room, timeout_s=100.0, max_attempts=1)
        try:
            return bytes(await reception.answer("/generate", {}))
        finally:
            reception.leave()
            assert room.taken == 0
            server.close()

    if isinstance(expected, bytes):
        assert asyncio.run(run()) == expected
    else:
        with pytest.raises(EngineLost, match="not reachable") as caught:
            asyncio.run(run())
        assert expected in str(caught.value)
