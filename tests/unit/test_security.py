"""Hostile input, refused while the service stays up: to the socket, in messages, bundles, encoded masks and routes."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from zmq import curve_keypair
from zmq.constants import SocketOption, SocketType
from zmq.sugar.context import Context
from zmq.sugar.socket import Socket

from benchmarks.peak import peak_bytes
from launch.job import free_port
from moe_trm.config.schema import Config
from moe_trm.errors import ControllerError, RecordRejected
from moe_trm.recording.bundle import BundleReader, BundleWriter
from moe_trm.rollout import service as service_module
from moe_trm.rollout.client import RolloutClient
from moe_trm.rollout.service import ControllerReply, ControllerService, Request, Start
from moe_trm.runtime import wire
from moe_trm.sampling_mask.codec import decode as decode_mask
from routing import RouteError, decode
from routing.record.codec import checksum, encode
from tests.unit.records import make_record
from tests.unit.rollout.fake_engine import FakeEngine, controller_with

KEY = "the right key"
ROUNDS = 1000


@contextmanager
def serving(folder: Path, endpoint: str = "", keys: tuple[bytes, bytes] = (b"", b"")) -> Iterator[str]:
    """A controller service on a socket in `folder` or at `endpoint`; it must still answer its own ranks at the end."""
    endpoint = endpoint or f"ipc://{folder}/controller"
    public_key, secret_key = (key.decode() for key in keys)

    async def serve() -> None:
        start = Start(endpoint, KEY, {}, None, secret_key)
        await ControllerService(controller_with(FakeEngine()), start, str(folder)).serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    yield endpoint
    with RolloutClient(endpoint, KEY, ranks=(0, 1), data=(0, 1), public_key=public_key) as client:
        assert client.evaluate(0)["eval/accuracy"] == 0.5
        client._ask("stop")
    thread.join(10)
    assert not thread.is_alive()


@contextmanager
def dealer(endpoint: str) -> Iterator[Socket[bytes]]:
    socket: Socket[bytes] = Context.instance().socket(SocketType.DEALER)
    socket.setsockopt(SocketOption.LINGER, 0)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()


def garbage(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))]


def mutated(rng: random.Random) -> list[bytes]:
    """A request with a wrong key, with some of its bytes changed, cut off or added."""
    body = bytearray(msgspec.msgpack.encode(Request("a guessed key", rng.choice(["batch", "push", "stop"]), step=1)))
    for _ in range(rng.randrange(1, 5)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return [bytes(body[: rng.randrange(1, len(body) + 1)]), *garbage(rng)[1:]]


def wrong_types(rng: random.Random) -> list[bytes]:
    odd: list[object] = [None, -1, 1 << 63, 1.5, "x", b"\xff", [], {}, [[]] * 50, {"a": {"b": []}}, "é" * 100]
    fields = {name: rng.choice(odd) for name in ("op", "step", "data_rank", "layer_ids", "entries", "state", "key")}
    return [msgspec.msgpack.encode(fields)]


def nested(rng: random.Random) -> list[bytes]:
    """Arrays in arrays, deeper than any stack, as the message or inside of it."""
    deep = b"\x91" * rng.randrange(1000, 100_000) + b"\xc0"
    inside = msgspec.msgpack.encode({"key": KEY, "op": "restore", "state": {"a": msgspec.Raw(deep)}})
    return [rng.choice([deep, inside])]


def authorised(rng: random.Random) -> list[bytes]:
    """The right key, but a request that makes no sense."""
    op = rng.choice(["", "é", "__class__", "batch ", "plan"])
    return [msgspec.msgpack.encode(Request(KEY, op, step=rng.randrange(-5, 5)))]


FUZZERS = [garbage, mutated, wrong_types, nested, authorised]


def test_a_thousand_malformed_requests_are_answered_with_errors(tmp_path: Path) -> None:
    rng = random.Random(0)
    with serving(tmp_path) as endpoint, dealer(endpoint) as socket:
        for number in range(ROUNDS):
            socket.send_multipart(FUZZERS[number % len(FUZZERS)](rng))
            assert socket.poll(10_000), f"request {number} was not answered"
            assert wire.decode(socket.recv_multipart(), ControllerReply).error


def test_a_request_without_the_key_changes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as endpoint, dealer(endpoint) as socket:
        for key in ("", "wrong", KEY[:-1], KEY + "x", "ключ"):
            for op in ("batch", "push", "evaluate", "state", "restore", "stop"):
                socket.send_multipart(wire.encode(Request(key, op, version=1, step=1)))
                assert "wrong controller key" in wire.decode(socket.recv_multipart(), ControllerReply).error


def test_a_message_beyond_the_limit_is_not_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "REQUEST_LIMIT_BYTES", 1 << 20)
    with serving(tmp_path) as endpoint, dealer(endpoint) as socket:
        socket.send_multipart([b"\0" * (2 << 20)])
        socket.send_multipart(wire.encode(Request(KEY, "evaluate")))
        assert socket.poll(10_000)
        # The first answer is to the second request: the first never arrived.
        assert wire.decode(socket.recv_multipart(), ControllerReply).metrics["eval/accuracy"] == 0.5


def test_between_machines_only_encrypted_requests_are_heard(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with dealer(endpoint) as plain, dealer(endpoint) as mistaken:
        with serving(tmp_path, endpoint, curve_keypair()):
            mistaken.disconnect(endpoint)
            mistaken.curve_publickey, mistaken.curve_secretkey = curve_keypair()
            mistaken.curve_serverkey = curve_keypair()[0]
            mistaken.connect(endpoint)
            for socket in (plain, mistaken):
                socket.send_multipart(wire.encode(Request(KEY, "stop")))
        # The service has answered its own rank, and was not stopped by these before.
        assert not plain.poll(0)
        assert not mistaken.poll(0)


def test_malformed_replies_are_refused_by_a_rank() -> None:
    rng = random.Random(1)
    good = [bytes(frame) for frame in wire.encode(ControllerReply(metrics={"a": 1.0}, state={"b": [1, "c"]}))]
    refused = 0
    for number in range(ROUNDS):
        frames = garbage(rng) if number % 2 else list(good)
        if number % 2 == 0:
            body = bytearray(frames[0])
            body[rng.randrange(len(body))] = rng.randrange(256)
            frames[0] = bytes(body[: rng.randrange(1, len(body) + 1)])
        try:
            wire.decode(frames, ControllerReply)
        except ControllerError:
            refused += 1
    assert refused > ROUNDS / 2


def test_a_message_deeper_than_the_stack_is_refused() -> None:
    deep = msgspec.msgpack.encode({"state": {"a": msgspec.Raw(b"\x91" * 100_000 + b"\xc0")}})
    with pytest.raises(ControllerError, match="malformed"):
        wire.decode([deep], ControllerReply)


def test_a_bundle_with_names_that_climb_writes_and_reads_nothing_elsewhere(tmp_path: Path) -> None:
    """Names in a bundle are data: they never become paths."""
    inside = tmp_path / "inside"
    climbing = replace(make_record(), prompt_id="../../climbed")
    BundleWriter(str(inside)).write(1, [climbing], {7: "../../reason"})
    [record] = BundleReader(str(inside)).read(1)
    assert record.prompt_id == "../../climbed"
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert [path.name for path in inside.iterdir()] == ["step-000001.safetensors"]


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """256 MiB of zeros in 256 KiB."""
    return b"\1" + zlib.compress(b"\0" * (1 << 28), 9)


def mask_of(*blocks: bytes, vocab_size: int, num_rows: int) -> bytes:
    header = struct.pack("<BBII", 1, 1, vocab_size, num_rows)
    return header + b"".join(struct.pack("<I", len(block)) + block for block in blocks)


@pytest.mark.parametrize(
    "blocks",
    [
        (None, b"", b"\0"),
        (b"\0\2", None, b"\0"),
        (b"\0\2", b"\0" * 4, None),
        (b"\0\xff" + struct.pack("<I", 1 << 30), b"", None),
    ],
    ids=["first", "second", "third", "third of many"],
)
def test_a_decompression_bomb_in_a_mask_is_refused_unexploded(blocks: tuple[bytes | None, ...], bomb: bytes) -> None:
    """The bomb is where `blocks` has none."""
    data = mask_of(*(block if block is not None else bomb for block in blocks), vocab_size=1 << 31, num_rows=1)
    assert len(data) < 1 << 20

    def read() -> None:
        with pytest.raises(RecordRejected):
            decode_mask(data, np.zeros(1, np.int32))

    assert peak_bytes(read) < 16 << 20


def test_routes_that_claim_to_be_huge_are_refused_unread() -> None:
    record = make_record().routes
    assert record is not None
    content = bytearray(encode(record)[:-16])
    for place in range(4, min(32, len(content))):
        forged = bytearray(content)
        forged[place] = 0xFF
        data = bytes(forged) + checksum(bytes(forged))

        def read(data: bytes = data) -> None:
            with suppress(RouteError):
                decode(data)

        assert peak_bytes(read) < 16 << 20


def test_secrets_are_left_out_of_what_is_written() -> None:
    config = Config.model_validate({"model": {"checkpoint": "m"}, "rollout": {"api_key": "hush"}})
    assert "hush" not in str(config.dump())
