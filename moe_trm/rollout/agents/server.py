"""The address at which agents find the policy: several interfaces over HTTP, a path and a key for each session.

It is served by the event loop of the controller. A session is found by its path, and its key opens no other.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from moe_trm.errors import ConfigError
from moe_trm.rollout.agents.api_error import ApiError
from moe_trm.rollout.agents.dialects.chat import CHAT
from moe_trm.rollout.agents.dialects.completions import COMPLETIONS
from moe_trm.rollout.agents.dialects.dialect import Body, Dialect, SessionFacts
from moe_trm.rollout.agents.dialects.messages import MESSAGES
from moe_trm.rollout.agents.dialects.responses import RESPONSES
from moe_trm.rollout.agents.live_session import LiveSession, beside
from moe_trm.rollout.agents.parameters import MODEL
from moe_trm.rollout.agents.request import ChatRequest, Request

MAX_LOGGED = 100
"""Failed and malformed requests that are logged: a stranger must not fill the disk."""


class _Few(logging.Filter):
    """Lets the first `MAX_LOGGED` messages through."""

    num_logged = 0

    def filter(self, record: logging.LogRecord) -> bool:
        self.num_logged += 1
        return self.num_logged <= MAX_LOGGED


log = logging.getLogger(__name__)
log.addFilter(_Few())
_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_Few())

OVERRIDDEN = "x-moe-trm-overridden"
"""Header of an answer: fields of its request that the run overrode."""
ANYWHERE = ("0.0.0.0", "::")
SILENT_S = 30.0
"""A connection that has not shown the key of a session by then is closed."""
MAX_STRANGERS = 256
"""Connections without a key at the same time; for a further one the oldest is closed."""
MAX_SHORT_BYTES = 1 << 14
"""A body of this length at most is read by the event loop itself, in a few milliseconds whatever it is."""
DIALECTS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
MODELS: Body = {
    "object": "list",
    "data": [
        {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "moe-trm",
            "type": "model",
            "display_name": MODEL,
            "created_at": "1970-01-01T00:00:00Z",
        }
    ],
    "has_more": False,
    "first_id": MODEL,
    "last_id": MODEL,
}
"""The answer of `/v1/models`, with the fields that OpenAI's clients know and those that Anthropic's know."""
_Handler = Callable[[LiveSession, web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Address:
    """A session's own: what an agent's client is given."""

    session_id: str
    base_url: str
    api_key: str


class AgentServer:
    """HTTP server of all sessions of a run. Port 0: any free one. `max_body_bytes` bounds the body of a request."""

    def __init__(self, host: str, port: int, *, max_body_bytes: int) -> None:
        self._host, self._port, self._limit = host, port, max_body_bytes
        self._sessions: dict[str, tuple[bytes, LiveSession]] = {}
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self._strangers: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._url = ""
        self._answers = 0
        self._ignored: set[str] = set()
        """Parameters that have been named in the log."""

    async def start(self) -> None:
        """Listen. Raises `ConfigError` where that is not possible."""
        app = web.Application(client_max_size=self._limit, middlewares=[_errors])
        path = "/sessions/{session}/v1"
        for dialect in DIALECTS:
            app.router.add_post(f"{path}/{dialect.path}", self._for(self._answers_in(dialect)))
            if dialect.count is not None:
                app.router.add_post(f"{path}/{dialect.path}/count_tokens", self._for(self._counts_in(dialect)))
        app.router.add_get(f"{path}/models", self._for(self._models))
        # A client that hangs up ends its request.
        self._runner = web.AppRunner(
            app, access_log=None, logger=_http_log, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                self._greet, self._host, self._port, backlog=MAX_STRANGERS
            )
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                "the address for agents cannot be used",
                where="config keys agent.host, agent.port",
                got=f"{self._host}:{self._port} ({error.strerror})",
                expected="an address of this machine and a free port; port 0: any",
            ) from error
        port = self._listening.sockets[0].getsockname()[1]
        host = "127.0.0.1" if self._host in ANYWHERE else self._host
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def open(self, session: LiveSession) -> Address:
        """An address for `session`, until `end`."""
        session_id, key = secrets.token_hex(8), f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[session_id] = key.encode(), session
        return Address(session_id, f"{self._url}/sessions/{session_id}/v1", key)

    def end(self, address: Address) -> None:
        """From now on the key opens nothing. Answers in flight are given up."""
        _, session = self._sessions.pop(address.session_id)
        session.close()

    async def close(self) -> None:
        """Stop listening."""
        if self._listening is not None:
            self._listening.close()
        for deadline in self._strangers.values():
            deadline.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    def _greet(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection, which must show a key soon: descriptors are few."""
        assert self._runner is not None
        assert self._runner.server is not None
        stranger = self._runner.server()
        self._strangers[stranger] = asyncio.get_running_loop().call_later(SILENT_S, self._turn_away, stranger)
        if len(self._strangers) > MAX_STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        return stranger

    def _turn_away(self, stranger: asyncio.BaseProtocol) -> None:
        self._strangers.pop(stranger).cancel()
        transport = getattr(stranger, "transport", None)
        if transport is not None:
            transport.abort()

    def _for(self, handler: _Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            try:
                return await handler(session, request)
            except (ApiError, web.HTTPException):
                session.refuse()
                raise
            except (web.RequestPayloadError, RecursionError) as error:
                session.refuse()
                raise ApiError(400, f"the body cannot be read: {type(error).__name__}") from error
            except Exception as error:
                session.refuse()
                log.exception("a request of an agent failed")
                raise ApiError(500, f"{type(error).__name__} in the policy's server") from error

        return handle

    def _session(self, request: web.Request) -> LiveSession:
        """The session of the path. Raises `ApiError` that does not show whether the path or the key is wrong."""
        key, session = self._sessions.get(request.match_info["session"], (b"", None))
        shown = _key(request).encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(shown, key) or session is None:
            raise ApiError(401, "no such session, or not its key", code="invalid_api_key")
        handle = self._strangers.pop(request.protocol, None)
        if handle is not None:
            handle.cancel()
        return session

    def _answers_in(self, dialect: Dialect) -> _Handler:
        async def answer(session: LiveSession, request: web.Request) -> web.StreamResponse:
            query = await self._read(dialect, session, request)
            self._answers += 1
            name = f"{dialect.prefix}_{self._answers}"
            node = await session.answer(query, name)
            return await _reply(request, dialect, dialect.write(node, name, query, session.vocabulary), query)

        return answer

    def _counts_in(self, dialect: Dialect) -> _Handler:
        async def count(session: LiveSession, request: web.Request) -> web.StreamResponse:
            query = await self._read(dialect, session, request)
            assert dialect.count is not None, "it has the path"
            assert isinstance(query, ChatRequest), "only conversations are counted"
            return _json(dialect.count(await session.count(query)))

        return count

    async def _read(self, dialect: Dialect, session: LiveSession, request: web.Request) -> Request:
        sent = await request.read()
        body = _json_of(sent)
        facts = SessionFacts(session.params, session.reads_calls, session.kept, session.model_names)
        # Another thread costs more time than a short body.
        short = len(sent) <= MAX_SHORT_BYTES
        query = dialect.read(body, facts) if short else await beside(lambda: dialect.read(body, facts))
        for name in query.options.ignored:
            if name not in self._ignored and len(self._ignored) < MAX_LOGGED:
                self._ignored.add(name)
                log.warning("agents send %s over /v1/%s, which has no effect here", name, dialect.path)
        return query

    async def _models(self, session: LiveSession, request: web.Request) -> web.StreamResponse:
        return _json(MODELS)


def _key(request: web.Request) -> str:
    """The key that a client shows, in the header that OpenAI's or Anthropic's clients use; empty without one."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def _json_of(sent: bytes) -> object:
    try:
        body: object = msgspec.json.decode(sent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON that can be read: {error}") from error
    return body


async def _reply(request: web.Request, dialect: Dialect, answer: Body, query: Request) -> web.StreamResponse:
    overridden = query.options.overridden
    headers = {OVERRIDDEN: ",".join(overridden)} if overridden else {}
    if not query.options.stream:
        return _json(answer, headers=headers)
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"} | headers)
    await stream.prepare(request)
    for event in dialect.events(answer, query):
        await stream.write(event)
    await stream.write_eof()
    return stream


def _json(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        refused = error
    except web.HTTPException as error:
        # Of aiohttp itself: an unknown path, another method, a body that is too long.
        refused = ApiError(error.status, error.reason)
    return _json(_dialect_of(request).refusal(refused), status=refused.status)


def _dialect_of(request: web.Request) -> Dialect:
    """The dialect whose path a request has; chat for paths that no dialect has."""
    _, _, path = request.path.partition("/v1/")
    return next((dialect for dialect in DIALECTS if path.startswith(dialect.path)), CHAT)
