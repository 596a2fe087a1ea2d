"""The CPU support package takes plain requests past SGLang's layers, and lets a paused scheduler keep them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu import paused
from moe_trm_sglang_cpu.front import REQUEST, Front

from moe_trm.rollout.servers.http import HEADERS

PLAIN = {
    "input_ids": [5, 6],
    "sampling_params": {"max_new_tokens": 4},
    "return_logprob": True,
    "return_routed_experts": True,
    "return_sampling_mask": True,
    "sampling_logprobs_mode": "support",
    "top_logprobs_num": 1,
    "routed_experts_start_len": 1,
}
HEAD = {"host": "x", "authorization": "Bearer k", "content-type": "application/json", "content-length": "9"}
KEYS = {"/generate": "Bearer k", "/weights_checker": "Bearer admin"}
OTHER_HEADS: list[dict[str, Any]] = [
    {"type": "lifespan"},
    {"method": "PUT"},
    {"path": "/generate/"},
    {"query_string": b"x=1"},
    {"headers": HEAD | {"authorization": "Bearer K"}},
    {"headers": {name: value for name, value in HEAD.items() if name != "authorization"}},
    {"headers": HEAD | {"content-type": "text/plain"}},
    {"headers": HEAD | {"content-encoding": "gzip"}},
    {"headers": HEAD | {"origin": "http://a.b"}},
    {"headers": HEAD | {"x-smg-routing-key": "a"}},
    {"headers": HEAD | {"x-moe-trm-answer": "ids", "origin": "http://a.b"}},
]
OTHER_BODIES: list[Any] = [
    [PLAIN],
    PLAIN | {"stream": True},
    PLAIN | {"stream": False},
    PLAIN | {"text": "a"},
    PLAIN | {"rid": "a"},
    PLAIN | {"input_ids": [[5], [6]]},
    PLAIN | {"input_ids": [5, 6.0]},
    PLAIN | {"input_ids": [5, True]},
    PLAIN | {"input_ids": None},
    PLAIN | {"sampling_params": [{}]},
    PLAIN | {"return_logprob": [True]},
    PLAIN | {"return_logprob": 1},
    PLAIN | {"top_logprobs_num": True},
    PLAIN | {"routed_experts_start_len": 1.0},
    PLAIN | {"input_ids": [5, 66]},
]


def passed(body: bytes, **other: Any) -> list[tuple[str, Any]]:
    """Which application got a request, and what it found; one `checked` refuses token 66."""
    found: list[tuple[str, Any]] = []
    headers = [(name.encode(), value.encode()) for name, value in other.pop("headers", HEAD).items()]
    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": headers, **other}
    parts = [body[:7], body[7:]]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None: ...

    async def native(scope: Any, receive: Any, send: Any) -> None:
        found.append(("native", (await receive())["body"] + (await receive())["body"]))

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        found.append(("plain", scope[REQUEST]))

    async def direct(scope: Any, receive: Any, send: Any) -> None:
        found.append(("direct", scope[REQUEST]))

    async def checksums(scope: Any, receive: Any, send: Any) -> None:
        found.append(("checksums", scope["path"]))

    def allowed(path: str, key: str | None) -> bool:
        return key == KEYS[path]

    front = Front(native, plain, direct, checksums, allowed, lambda it: None if 66 in it["input_ids"] else it)
    asyncio.run(front(scope, receive, send))
    return found


def test_a_plain_request_takes_the_short_way() -> None:
    assert passed(orjson.dumps(PLAIN)) == [("plain", PLAIN)]
    fewer = {name: PLAIN[name] for name in ("sampling_params", "input_ids")}
    assert passed(orjson.dumps(fewer)) == [("plain", fewer)]


def test_a_client_that_reads_no_text_is_answered_directly() -> None:
    wish = "x-moe-trm-answer"
    ours = {name.lower(): value for name, value in HEADERS.items()}
    assert passed(orjson.dumps(PLAIN), headers=HEAD | ours) == [("direct", PLAIN)]
    assert passed(orjson.dumps(PLAIN), headers=HEAD | {wish: "ids"}) == [("direct", PLAIN)]
    assert passed(orjson.dumps(PLAIN), headers=HEAD | {wish: "text"}) == [("plain", PLAIN)]
    other = PLAIN | {"text": "a"}
    assert passed(orjson.dumps(other), headers=HEAD | {wish: "ids"}) == [("native", orjson.dumps(other))]


@pytest.mark.parametrize("other", OTHER_HEADS, ids=str)
def test_a_request_with_another_head_takes_the_way_of_sglang(other: dict[str, Any]) -> None:
    assert passed(orjson.dumps(PLAIN), **other) == [("native", orjson.dumps(PLAIN))]


@pytest.mark.parametrize("body", OTHER_BODIES, ids=str)
def test_a_request_with_another_body_takes_it_too_and_whole(body: Any) -> None:
    assert passed(orjson.dumps(body)) == [("native", orjson.dumps(body))]


def test_a_body_that_is_no_json_takes_it_too() -> None:
    assert passed(b"{'input_ids'") == [("native", b"{'input_ids'")]


def test_a_request_for_all_checksums_takes_the_short_way_with_the_key_of_its_path() -> None:
    asked, path = b'{"action":"checksum"}', "/weights_checker"
    head = HEAD | {"authorization": "Bearer admin"}
    assert passed(asked, path=path, headers=head) == [("checksums", path)]
    assert passed(asked, path=path, headers=HEAD) == [("native", asked)]
    assert passed(asked, path=path, headers=head | {"origin": "http://a.b"}) == [("native", asked)]
    for other in (b'{"action": "snapshot"}', b'{"action":"checksum","selector":"draft"}', orjson.dumps(PLAIN)):
        assert passed(other, path=path, headers=head) == [("native", other)]
    assert passed(asked) == [("native", asked)]


class Manager:
    """Lets requests through while it is not paused, as SGLang's tokenizer manager does."""

    def __init__(self) -> None:
        self.is_pause, self.sent = False, list[str]()
        paused.open_door(lambda manager: None, self)

    async def pause(self, mode: str) -> None:
        async def native(manager: Any, obj: Any) -> None:
            manager.is_pause = True
            manager.sent.append(f"pause {obj.mode}")

        await paused.pause(native, self, SimpleNamespace(mode=mode))

    async def go_on(self) -> None:
        async with self.is_pause_cond:
            self.is_pause = False
            self.is_pause_cond.notify_all()

    async def request(self, name: str) -> None:
        async with self.is_pause_cond:
            await self.is_pause_cond.wait_for(lambda: not self.is_pause)
        self.sent.append(name)

    is_pause_cond: Any


@pytest.mark.parametrize(
    ("mode", "order"),
    [
        ("retract", ["before", "pause retract", "meanwhile", "end", "after"]),
        ("in_place", ["before", "pause in_place", "meanwhile", "end", "after"]),
        ("abort", ["before", "pause abort", "end", "meanwhile", "after"]),
    ],
)
def test_requests_of_a_pause_go_on_to_a_scheduler_that_is_paused_itself(mode: str, order: list[str]) -> None:
    async def run() -> list[str]:
        manager = Manager()
        for first in ("retract", mode):  # a pause says nothing of the next one
            manager.sent.clear()
            await manager.request("before")
            await manager.pause(first)
            meanwhile = asyncio.ensure_future(manager.request("meanwhile"))
            await asyncio.sleep(0.01)
            manager.sent.append("end")
            await manager.go_on()
            await meanwhile
            await manager.request("after")
        return manager.sent

    assert asyncio.run(run()) == order


def test_a_paused_scheduler_waits_for_the_next_message() -> None:
    done: list[str] = []
    scheduler = SimpleNamespace(maybe_sleep_on_idle=lambda: done.append("waited"))
    paused.wait(lambda _: done.append("recorded"), scheduler)
    assert done == ["recorded", "waited"]
