"""SGLang's door for plain requests to `/generate` and for checksums, without layers that have nothing to do for them.

A request passes a dozen layers, and is compared with the paths of a hundred others, before SGLang looks at it. For the
short answers of a small model that takes longer than all that follows. Here a request whose head and fields are known
is checked against the key and the contract by SGLang's own functions, and handed to SGLang's own handler. Every other
request takes the way through all layers, as if it had not been looked at.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from moe_trm_sglang_cpu.direct import DIRECT, Direct

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

PATH, JSON = "/generate", b"application/json"
CHECKSUMS, ASK_CHECKSUMS = "/weights_checker", b'{"action":"checksum"}'
"""Path, and body of a request for the checksums of all weights."""
WISH, IDS = b"x-moe-trm-answer", b"ids"
"""Header of a client that reads no text, and its value."""
HEADERS = frozenset(
    {b"host", b"authorization", b"content-type", b"content-length", b"accept", b"accept-encoding", b"user-agent", WISH}
)
"""Headers that change nothing, apart from the key, the type of the body, and the wish."""
FIELDS: Mapping[str, type] = {
    "input_ids": list,
    "sampling_params": dict,
    "return_logprob": bool,
    "return_routed_experts": bool,
    "return_sampling_mask": bool,
    "sampling_logprobs_mode": str,
    "top_logprobs_num": int,
    "routed_experts_start_len": int,
}
"""Fields of one plain request, and their types in JSON."""
REQUEST, ERROR = "moe_trm.request", "moe_trm.error"
"""Keys of the checked request, and of what went wrong, in an ASGI scope."""


class Front:
    """ASGI application that answers plain requests, and hands all others to `native`.

    Args:
        native: all layers of SGLang's server.
        plain: answers a request that is admitted; it is in the scope (`REQUEST`).
        direct: likewise, for a client that reads no text.
        checksums: answers a request for the checksums of all weights.
        allowed: True for a path and the value of a header `Authorization` with which it may be answered.
        checked: the request of a body of known fields; None where SGLang has to say what is wrong with it.
    """

    def __init__(
        self,
        native: App,
        plain: App,
        direct: App,
        checksums: App,
        allowed: Callable[[str, str | None], bool],
        checked: Callable[[dict[str, Any]], object | None],
    ) -> None:
        self._native, self._plain, self._direct, self._checksums = native, plain, direct, checksums
        self._allowed, self._checked = allowed, checked

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        if not (is_plain(scope, headers) and self._allowed(scope["path"], _authorization(headers))):
            await self._native(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        if scope["path"] == CHECKSUMS:
            app = self._checksums if body == ASK_CHECKSUMS else self._native
            await app(scope, _again(messages, receive), send)
            return
        fields = known_fields(body)
        request = self._checked(fields) if fields is not None else None
        if request is None:
            await self._native(scope, _again(messages, receive), send)
        else:
            app = self._direct if headers.get(WISH) == IDS else self._plain
            await app({**scope, REQUEST: request}, receive, send)


def is_plain(scope: Any, headers: Mapping[bytes, bytes]) -> bool:
    """True for a request to one of the two paths whose head asks for nothing special."""
    known = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in (PATH, CHECKSUMS)
    if not known or scope["query_string"]:
        return False
    return len(headers) == len(scope["headers"]) and headers.keys() <= HEADERS and headers.get(b"content-type") == JSON


def known_fields(body: bytes) -> dict[str, Any] | None:
    """The fields of a body with nothing but `FIELDS`; None for any other body."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict) or any(type(value) is not FIELDS.get(name) for name, value in found.items()):
        return None
    return found if all(type(token) is int for token in found.get("input_ids", ())) else None


def _authorization(headers: Mapping[bytes, bytes]) -> str | None:
    value = headers.get(b"authorization")
    return None if value is None else value.decode("latin-1")


def _again(messages: list[Message], receive: Receive) -> Receive:
    """The messages that were read, and then the next ones."""
    left = messages[::-1]

    async def receive_again() -> Message:
        return left.pop() if left else await receive()

    return receive_again


def register() -> None:
    """Ask SGLang to call `put_before` before it starts its server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
    HookRegistry.register(server, put_before, HookType.BEFORE)


def put_before(*_arguments: object, **_options: object) -> None:
    """Put a `Front` before the layers of SGLang's server. Before SGLang starts it."""
    from sglang.srt.entrypoints import http_server

    app: Any = http_server.app
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: _front(http_server, build())


def _front(http_server: Any, native: App) -> App:
    from sglang.srt.entrypoints.api_contract import generate_contract_error
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.observability import http_request_metrics
    from sglang.srt.utils.auth import AuthLevel, decide_request_auth
    from starlette.middleware.exceptions import ExceptionMiddleware
    from starlette.requests import Request

    serving = http_server.get_serving()
    if serving.tokenizer_worker_num != 1 or http_request_metrics._http_request_metrics is not None:
        return native

    endpoints = {PATH: http_server.generate_request, CHECKSUMS: http_server.check_weights}
    levels = {path: getattr(endpoint, "_auth_level", AuthLevel.NORMAL) for path, endpoint in endpoints.items()}

    def allowed(path: str, authorization: str | None) -> bool:
        decision = decide_request_auth(
            method="POST",
            path=path,
            authorization_header=authorization,
            api_key=serving.api_key,
            admin_api_key=serving.admin_api_key,
            auth_level=levels[path],
        )
        return bool(decision.allowed)

    def checked(fields: dict[str, Any]) -> object | None:
        return None if generate_contract_error(fields) is not None else GenerateReqInput(**fields)

    async def plain(scope: Any, receive: Receive, send: Send) -> None:
        response = await http_server.serve_generate_request(scope[REQUEST], Request(scope, receive))
        await response(scope, receive, send)

    async def failed(scope: Any, receive: Receive, send: Send) -> None:
        error = scope[ERROR]
        if not isinstance(error, ValueError):
            raise error
        await http_server._create_error_response(error)(scope, receive, send)

    async def direct(scope: Any, receive: Receive, send: Send) -> None:
        way: Direct | None = getattr(http_server._global_state.tokenizer_manager, DIRECT, None)
        if way is None or scope[REQUEST].top_logprobs_num or not way.is_open():
            await guarded(scope, receive, send)
            return
        try:
            out = await way.answer(scope[REQUEST], Request(scope, receive).is_disconnected)
        except Exception as error:  # noqa: BLE001 (SGLang's handlers make the answer)
            await guarded_failed({**scope, ERROR: error}, receive, send)
            return
        body = out if isinstance(out, bytes) else http_server.dumps_json(out)
        head = [(b"content-type", JSON), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    async def checksums(scope: Any, receive: Receive, send: Send) -> None:
        await (await http_server.check_weights())(scope, receive, send)

    handlers = {key: value for key, value in http_server.app.exception_handlers.items() if key not in (500, Exception)}
    guarded, guarded_failed, guarded_checksums = (
        ExceptionMiddleware(app, handlers=handlers) for app in (plain, failed, checksums)
    )
    return Front(native, guarded, direct, guarded_checksums, allowed, checked)
