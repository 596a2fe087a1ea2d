"""Bodies of answers arrive whole, or the server is at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.errors import EngineError, EngineLost
from moe_trm.rollout.servers import http as http_module
from moe_trm.rollout.servers.http import AnswerTooLong, EngineHttp, EngineSlow, HttpStatusError
from tests.unit.rollout.local_app import LocalApp


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


def received(app: Bodies, *, timeout_s: float = 100.0) -> int:
    async def run() -> int:
        await app.start()
        try:
            http = EngineHttp(app.url, None, timeout_s=timeout_s, max_attempts=2)
            async with http:
                body = await http.request("POST", "/generate", {})
                assert body == b"x" * app.size
                return len(body)
        finally:
            await app.stop()

    return asyncio.run(run())


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [0, 1, 1000, 3_000_000])
def test_a_body_is_received_whole(size: int, chunked: bool) -> None:
    assert received(Bodies(size, chunked=chunked)) == size


def test_a_body_that_ends_early_is_an_error() -> None:
    app = Bodies(1000)
    app.cut = True
    with pytest.raises(EngineLost):
        received(app)


def test_a_refusal_is_told_with_its_status() -> None:
    with pytest.raises(HttpStatusError) as caught:
        received(Bodies(10, status=404))
    assert caught.value.status == 404


def test_a_server_that_says_nothing_is_slow() -> None:
    class Silent(Bodies):
        async def _generate(self, request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(3600)
            raise AssertionError

    with pytest.raises(EngineSlow):
        received(Silent(1), timeout_s=0.2)


OK = b"HTTP/1.1 200 OK\r\n"


def answered(raw: bytes) -> bytes:
    """The body that a server's bytes are read as."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    async def run() -> bytes:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            async with EngineHttp(url, None, timeout_s=100.0, max_attempts=1) as http:
                return await http.request("POST", "/generate", {})
        finally:
            server.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (OK + b"Content-Length: 3\r\n\r\nabc", b"abc"),
        (OK + b"Connection: close\r\n\r\nuntil the end", b"until the end"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n", b"abc"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nxy\r\nab", None),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", None),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nab", None),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nab", None),
        (OK + b"Content-Length: 4\r\n\r\nabc", None),
        (OK + b"Content-Length: -4\r\n\r\nabc", None),
        (OK + b"Content-Length: " + b"9" * 30 + b"\r\n\r\nabc", None),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"SSH-2.0-x\r\n\r\n", None),
        (b"HTTP/1.1 huh\r\n\r\n", None),
        (OK + b"x" * 300_000, None),
        (OK, None),
        (b"", None),
    ],
)
def test_what_is_http_is_read_and_what_is_not_is_refused(raw: bytes, expected: bytes | None) -> None:
    """Bytes that are packed are no JSON, and are left to the parser."""
    if expected is not None:
        assert answered(raw) == expected
    else:
        with pytest.raises(EngineError):
            answered(raw)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [b"HTTP/1.1 200 OK\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked", b"\r\n", b"5", b"-1", b"0",
             b"f" * 16, b"9" * 25, b"abcde", b"\0", b":", b" "]
        ),
        max_size=12,
    )
)  # fmt: skip
def test_whatever_a_server_sends_is_an_answer_or_an_error_of_the_engine(parts: list[bytes]) -> None:
    with suppress(EngineError):
        answered(b"".join([OK, *parts]))


@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_beyond_the_bound_is_refused(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "MAX_ANSWER_BYTES", 1000)
    assert received(Bodies(1000, chunked=chunked)) == 1000
    with pytest.raises(AnswerTooLong, match="at most 1000"):
        received(Bodies(1001, chunked=chunked))
