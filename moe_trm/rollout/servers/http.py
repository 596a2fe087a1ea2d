"""Authenticated JSON requests to one server, with bounded retries and errors that say what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from moe_trm.errors import EngineError, EngineLost, RecordRejected

FIRST_PAUSE_S = 0.25
"""Pause before the second attempt; it doubles with each further one."""

Body = Mapping[str, object] | Callable[[], Mapping[str, object]]

HEADERS = {"Content-Type": "application/json"}
"""Headers of every request, beside the key."""
MAX_ERROR_CHARACTERS = 500
TOO_MANY_REQUESTS = 429
MAX_ANSWER_BYTES = 2 << 30
"""A longer answer is none: its server is broken, or not ours."""


class HttpStatusError(EngineError):
    """The server answered, with an HTTP status of 400 or more: `status`."""

    status = 0


class AnswerTooLong(EngineError):
    """The server answered with more than `MAX_ANSWER_BYTES`, or says that it will."""


class EngineSlow(EngineLost):
    """Nothing came within the time limit."""


class ServerFailed(HttpStatusError, EngineLost):
    """The server answered every attempt with an HTTP status of 500 or more, or with 429: it has too much to do."""


ERRORS = (AnswerTooLong, EngineLost, EngineSlow, HttpStatusError, ServerFailed)
"""All that `EngineHttp.request` raises."""


class EngineHttp:
    """One connection pool to one server.

    `timeout_s` limits one attempt, the server's queue included; `max_attempts` are made when the connection fails or
    the server answers 5xx.
    """

    def __init__(self, url: str, api_key: str | None, *, timeout_s: float, max_attempts: int) -> None:
        self.url = url.rstrip("/")
        self._timeout_s, self._max_attempts = timeout_s, max_attempts
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float | None = None, attempts: int | None = None) -> Any:
        """Parsed JSON of a GET. Raises `EngineError`."""
        content = await self.request("GET", path, timeout_s=timeout_s, attempts=attempts)
        return parsed(content, f"GET {self.url}{path}")

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        """Parsed JSON of a POST. Raises `EngineError`."""
        return parsed(await self.request("POST", path, body), f"POST {self.url}{path}")

    async def request(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        timeout_s: float | None = None,
        attempts: int | None = None,
    ) -> bytes:
        """The body of a successful answer.

        Raises `AnswerTooLong`, `EngineLost` once the attempts are used up, at once for timeouts, and `HttpStatusError`
        at once for 4xx other than 429. `timeout_s` and `attempts` replace this connection's. A function makes the body
        of each attempt anew.
        """
        attempts, timeout_s = attempts or self._max_attempts, timeout_s or self._timeout_s
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            last = attempt == attempts - 1
            try:
                status, content = await self._once(method, path, body, timeout_s)
            except TimeoutError as error:
                raise EngineSlow(
                    "the rollout server did not answer in time",
                    where=f"{method} {self.url}{path}",
                    got=f"nothing within {timeout_s:g} s",
                    fix="Look into the server's log; raise rollout.timeout_s if it is only slow.",
                ) from error
            except aiohttp.ClientError as error:
                if last:
                    raise self._unreachable(method, path, error, attempts) from error
                continue
            if status < 400:
                return content
            if last or not _may_pass(status):
                raise self._refused(method, path, status, content)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def close(self) -> None:
        """Release the connections."""
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _once(self, method: str, path: str, body: Body | None, timeout_s: float) -> tuple[int, bytes]:
        if self._session is None:
            # The caller bounds concurrency; a second bound in the pool would only hide where requests wait.
            self._session = aiohttp.ClientSession(
                headers={**self._headers, **HEADERS},
                connector=aiohttp.TCPConnector(limit=0),
                # The server sets no cookies and packs nothing: what asks for that is left out of each request.
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(),
            )
        data = None if body is None else orjson.dumps(body() if callable(body) else body)
        async with asyncio.timeout(timeout_s):
            async with self._session.request(method, self.url + path, data=data) as response:
                size = response.content_length
                if size is not None and size > MAX_ANSWER_BYTES:
                    raise self._too_long(method, path, size)
                parts, room_bytes = [], MAX_ANSWER_BYTES
                async for part in response.content.iter_any():
                    parts.append(part)
                    if (room_bytes := room_bytes - len(part)) < 0:
                        raise self._too_long(method, path, MAX_ANSWER_BYTES - room_bytes)
                return response.status, b"".join(parts)

    def _too_long(self, method: str, path: str, size: int) -> AnswerTooLong:
        return AnswerTooLong(
            "the rollout server's answer is too long",
            where=f"{method} {self.url}{path}",
            got=f"{size} bytes or more",
            expected=f"at most {MAX_ANSWER_BYTES}",
        )

    def _unreachable(self, method: str, path: str, error: aiohttp.ClientError, attempts: int) -> EngineLost:
        return EngineLost(
            "the rollout server is not reachable",
            where=f"{method} {self.url}{path}",
            got=f"{error} ({attempts} attempts)",
            expected="a running SGLang server",
            fix=(
                "Start it with `python -m launch.rollout CONFIG` and wait until it says ready, or correct rollout.url "
                "or rollout.server.port."
            ),
        )

    def _refused(self, method: str, path: str, status: int, content: bytes) -> HttpStatusError:
        kind = ServerFailed if _may_pass(status) else HttpStatusError
        error = kind(
            f"the rollout server answered with an error (HTTP {status})",
            where=f"{method} {self.url}{path}",
            got=content.decode(errors="replace")[:MAX_ERROR_CHARACTERS],
            expected="HTTP 200",
            fix="Give both sides the same key: rollout.api_key or MOE_TRM_API_KEY."
            if status in (401, 403)
            else "The server's log has the cause.",
        )
        error.status = status
        return error


def refused(error: HttpStatusError) -> RecordRejected:
    """The rejection of a sample whose request a server refuses, while it answers others."""
    return RecordRejected(
        "refused",
        "the rollout server refuses this request",
        where=error.where,
        got=error.got,
        expected="an answer",
        fix="Shorten prompts or rollout.max_new_tokens if it is too long, or raise the server's context length.",
    )


def parsed(content: bytes, where: str) -> Any:
    """The JSON of an answer. Raises `EngineLost` for anything else, as from a proxy before a server that is away."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        got = content[:MAX_ERROR_CHARACTERS].decode(errors="replace")
        raise EngineLost("something else than the rollout server answers here", where=where, got=got) from error


def _may_pass(status: int) -> bool:
    return status >= 500 or status == TOO_MANY_REQUESTS
