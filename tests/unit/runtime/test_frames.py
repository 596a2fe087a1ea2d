"""Messages between a process and its child, over real pipes: whole, many, cut short, and nonsense."""

from __future__ import annotations

import asyncio
import io

import msgspec
import pytest

from moe_trm.runtime.child_messages import Call, ToChild
from moe_trm.runtime.frames import frame, from_child, from_parent

MESSAGES = [Call(number, {"text": "x" * number, "values": [1.5, None, b"\0"]}) for number in (1, 70_000, 3)]
DECODER: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)


async def echoed(sent: bytes) -> list[ToChild]:
    """The messages of a child that writes `sent`, until there are no more."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
    assert child.stdin is not None
    child.stdin.write(sent)
    child.stdin.close()
    found = []
    while (message := await from_child(child, DECODER)) is not None:
        found.append(message)
    await child.wait()
    return found


def test_what_was_sent_comes_in_order() -> None:
    sent = b"".join(map(frame, MESSAGES))
    assert asyncio.run(echoed(sent)) == MESSAGES
    source = io.BytesIO(sent)
    assert [from_parent(source, DECODER) for _ in MESSAGES] == MESSAGES
    assert from_parent(source, DECODER) is None


@pytest.mark.parametrize("kept", [1, 4, 6, -1])
def test_half_a_message_is_none(kept: int) -> None:
    """The other process was killed while it wrote: a part of the length, the length, and parts of the body."""
    sent = b"".join(map(frame, MESSAGES[:2])) + frame(MESSAGES[2])[:kept]
    assert asyncio.run(echoed(sent)) == MESSAGES[:2]
    source = io.BytesIO(sent)
    assert [from_parent(source, DECODER) for _ in MESSAGES] == [*MESSAGES[:2], None]


def test_what_is_no_message_ends_the_conversation() -> None:
    nonsense = frame({"type": "Nobody"})
    assert asyncio.run(echoed(frame(MESSAGES[0]) + nonsense + frame(MESSAGES[2]))) == MESSAGES[:1]


def test_only_plain_data_is_sent() -> None:
    with pytest.raises(TypeError):
        frame({"value": object()})
    assert frame({"value": object()}, lambda _value: 1.0) == frame({"value": 1.0})
