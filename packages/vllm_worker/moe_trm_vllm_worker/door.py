"""ASGI middleware in front of vLLM's API server: the key, weight pushes, and the version and prompt of each answer.

vLLM labels its weights as a whole, and no answer. Here a push waits until nothing is being answered, and answers wait
until it is loaded. So each answer is of one version: that of the weights when it was let in. Each also gets the ids
that it was asked to continue: the `request_id` in vLLM's own answers is a random one.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

KEY_VARIABLE = "MOE_TRM_API_KEY"
OPEN_PATH = "/health"
SAMPLED_PATH = "/inference/v1/generate"
NO_PUSH = "none"
"""Version of weights that no push brought, and of those of a push that failed."""


class Door:
    """See the module. `app` is vLLM's; its state has the engine once the server is up."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        if not os.environ.get(KEY_VARIABLE):
            raise ValueError(f"the environment variable {KEY_VARIABLE} has no key, so everybody could load weights")
        self._app, self._key = app, f"Bearer {os.environ[KEY_VARIABLE]}".encode()
        self._version, self._answering, self._held = NO_PUSH, 0, False
        self._loading = asyncio.Lock()
        self._changed = asyncio.Condition()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] == OPEN_PATH):
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif not hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._key):
            await _reply(send, 401, {"error": "wrong key"})
        elif scope["path"] == SAMPLED_PATH:
            await self._answer(scope, receive, send)
        elif scope["path"] == "/moe_trm/weights" and scope["method"] == "GET":
            await _reply(send, 200, _served(scope["app"].state.engine_client) | {"version": self._version})
        elif scope["path"] == "/moe_trm/weights":
            await self._load(scope["app"].state.engine_client, json.loads(await _body(receive)), send)
        elif scope["path"] == "/moe_trm/join":
            await self._join(scope["app"].state.engine_client, json.loads(await _body(receive)), send)
        elif scope["path"] == "/moe_trm/hold":
            self._held = True
            await _reply(send, 200, {})
        elif scope["path"] == "/moe_trm/abort":
            await self._abort(scope["app"].state.engine_client)
            await _reply(send, 200, {})
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """One answer, with its prompt and the version of the weights that make it; it waits for a push under way."""
        body = await _body(receive)
        label = {"prompt_token_ids": _prompt_ids(body)}
        async with self._changed:
            await self._changed.wait_for(lambda: not (self._held or self._loading.locked()))
            self._answering += 1
        try:
            await self._app(scope, _again(body, receive), _labelled(send, {"weight_version": self._version, **label}))
        finally:
            async with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    async def _join(self, engine: Any, asked: dict[str, Any], send: Send) -> None:
        """Let the workers form a group with each learner rank that will broadcast."""
        try:
            await engine.collective_rpc("moe_trm_join", args=(asked["meetings"],))
        except Exception as error:  # noqa: BLE001 - as in `_load`
            await _reply(send, 400, {"error": f"{type(error).__name__}: {error}"})
        else:
            await _reply(send, 200, {})

    async def _load(self, engine: Any, asked: dict[str, Any], send: Send) -> None:
        """Load a push once nothing is being answered, and empty the prefix cache."""
        work = ("moe_trm_load", asked["folder"]) if "folder" in asked else ("moe_trm_receive", asked["buckets"])
        try:
            async with self._loading:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._answering)
                self._version = NO_PUSH
                workers = await engine.collective_rpc(work[0], args=work[1:])
                if not await engine.reset_prefix_cache():
                    raise RuntimeError("the prefix cache could not be emptied: requests still hold it")
                self._version = str(asked["version"])
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the answer
            await _reply(send, 400, {"error": f"{type(error).__name__}: {error}"})
        else:
            await _reply(send, 200, {"version": self._version, "workers": workers})
        finally:
            async with self._changed:
                self._held = False
                self._changed.notify_all()

    async def _abort(self, engine: Any) -> None:
        await engine.pause_generation(mode="abort", clear_cache=False)
        await engine.resume_generation()


def _served(engine: Any) -> dict[str, Any]:
    """The settings that the server was started with."""
    config = engine.vllm_config
    model = config.model_config
    return {
        "engine": "vllm",
        "release": sys.modules["vllm"].__version__,
        "model": str(model.model),
        "architectures": list(model.architectures),
        "vocab_size": model.get_vocab_size(),
        "max_model_len": model.max_model_len,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "returns_routes": bool(model.enable_return_routed_experts),
        "logprobs_mode": str(model.logprobs_mode),
        "max_logprobs": model.max_logprobs,
        "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
    }


def _labelled(send: Send, fields: Mapping[str, object]) -> Send:
    """`send` that puts fields at the beginning of the JSON object of a successful answer."""
    label = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    held: list[Message] = []

    async def labelled(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            headers = [
                (name, _longer(value, label) if name == b"content-length" else value)
                for name, value in message["headers"]
            ]
            held.append({**message, "headers": headers})
            return
        if held:
            body = bytes(message.get("body", b""))
            if not body.startswith(b'{"'):
                raise RuntimeError("an answer that is no JSON object in one piece cannot be labelled")
            await send(held.pop())
            message = {**message, "body": label + b"," + body[1:]}
        await send(message)

    return labelled


def _longer(length: bytes, label: bytes) -> bytes:
    return str(int(length) + len(label)).encode()


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _prompt_ids(body: bytes) -> object:
    """What a request asks to continue; None of a request that vLLM will refuse."""
    try:
        request = json.loads(body)
    except ValueError:
        return None
    return request.get("token_ids") if isinstance(request, dict) else None


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` whose first message is a body that was read already."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return messages.pop() if messages else await receive()

    return received


async def _reply(send: Send, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
