"""Ranks on other machines, whose connections to the controller are cut, swallow an answer, or fall silent."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import torch
from zmq import curve_keypair

from launch.job import free_port
from moe_trm.rollout import client as client_module
from moe_trm.rollout import service as service_module
from moe_trm.rollout.client import RolloutClient
from moe_trm.rollout.service import ControllerReply, ControllerService, Start
from moe_trm.sync.disk import write_shard
from moe_trm.sync.manifest import WeightPush
from moe_trm.sync.rounding import Rounding
from tests.unit.rollout.fake_engine import FakeEngine, controller_with

KEY, LIMIT_S = "the right key", 60.0


class Cutting:
    """A proxy in front of `port` that treats its connections badly.

    Attributes:
        port: where it listens.
        swallows: it cuts a connection in the place of the next large answer.
        silent: nothing passes on the connections that are open, and they stay open.
    """

    def __init__(self, port: int) -> None:
        self._target, self._open = port, list[socket.socket]()
        self.swallows, self.silent, self.num_connections = False, set[socket.socket](), 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset every connection, as a router that has forgotten it does."""
        for each in self._open:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RD)
            each.close()
        self._open.clear()

    def fall_silent(self) -> None:
        self.silent = {*self._open}

    def close(self) -> None:
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # the controller does not listen yet: whoever connects tries again
                    near.close()
                    continue
                self._open += [near, far]
                self.num_connections += 1
                for source, sink, answers in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass_on, args=(source, sink, answers), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and self.swallows and len(data) > 1000:
                    self.swallows = False
                    self.cut()
                    return
                if source not in self.silent:
                    sink.sendall(data)


class Engine(FakeEngine):
    """Loads a push when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.free = threading.Event(), threading.Event()

    async def load_weights(self, push: WeightPush) -> None:
        self.asked.set()
        await asyncio.to_thread(self.free.wait, LIMIT_S)
        await super().load_weights(push)


@contextmanager
def controller(folder: Path, engine: Engine) -> Iterator[tuple[Cutting, str]]:
    """A controller as ranks on several machines reach it; the proxy in front of it, and the controller's public key."""
    msgspec.msgpack.Decoder(ControllerReply, dec_hook=lambda kind, value: value)
    (folder / "config.json").write_text("{}")
    port, (public_key, secret_key) = free_port(), curve_keypair()
    start = Start(f"tcp://127.0.0.1:{port}", KEY, {}, None, secret_key.decode())

    async def serve() -> None:
        await ControllerService(controller_with(engine), start, str(folder)).serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    proxy = Cutting(port)
    try:
        yield proxy, public_key.decode()
    finally:
        engine.free.set()
        with RolloutClient(start.endpoint, KEY, ranks=(0, 1), data=(0, 1), public_key=public_key.decode()) as last:
            last._ask("stop")
        thread.join(LIMIT_S)
        proxy.close()
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ASK_AGAIN_S", 0.5)
    monkeypatch.setattr(client_module, "_POLL_MS", 100)
    monkeypatch.setattr(service_module, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(service_module, "SILENCE_MS", 2000)


@contextmanager
def rank(proxy: Cutting, public_key: str, number: int = 0, of: int = 1) -> Iterator[RolloutClient]:
    endpoint = f"tcp://127.0.0.1:{proxy.port}"
    with RolloutClient(endpoint, KEY, ranks=(number, of), data=(number, of), public_key=public_key) as made:
        yield made


def in_thread(work: object, *args: object, **kwargs: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, kwargs=kwargs, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


@pytest.mark.parametrize("harm", ["cut", "fall_silent"])
def test_a_push_whose_connections_are_lost_is_loaded_once_and_every_rank_goes_on(tmp_path: Path, harm: str) -> None:
    engine, directory = Engine(), tmp_path / "push"
    with controller(tmp_path, engine) as (proxy, key), rank(proxy, key, 0, 2) as one, rank(proxy, key, 1, 2) as two:
        shards = [
            write_shard(directory / f"{number}.safetensors", [(f"tensor.{number}", torch.ones(2))], Rounding("float32"))
            for number in range(2)
        ]
        pushes = [
            in_thread(each.push, 0, shard, directory=str(directory))
            for each, shard in zip((one, two), shards, strict=True)
        ]
        assert engine.asked.wait(LIMIT_S)
        getattr(proxy, harm)()
        engine.free.set()
        for push in pushes:
            push.join(LIMIT_S)
            assert not push.is_alive(), "a rank waits for an answer that was lost"
        assert [sorted(entry.name for entry in push.tensors) for push in engine.pushes] == [["tensor.0", "tensor.1"]]
        assert proxy.num_connections >= 4


def test_an_answer_that_is_lost_on_its_way_is_given_again_and_taken_once(tmp_path: Path) -> None:
    engine = Engine()
    engine.free.set()
    with controller(tmp_path, engine) as (proxy, key), rank(proxy, key) as client:
        client.push(0, (), directory=str(tmp_path))
        proxy.swallows = True
        batch = client.next_batch(1, (0, 1))
        assert not proxy.swallows
        # Neither is an answer that comes twice taken for that to the next request, nor is a step sampled twice.
        again = client.next_batch(1, (0, 1))
        assert again.metrics == batch.metrics
        assert client.evaluate(0)["eval/accuracy"] == 0.5


def test_a_request_that_is_asked_again_and_again_is_worked_on_once(tmp_path: Path) -> None:
    engine = Engine()
    with controller(tmp_path, engine) as (proxy, key), rank(proxy, key) as client:
        push = in_thread(client.push, 0, (), directory=str(tmp_path))
        assert engine.asked.wait(LIMIT_S)
        push.join(2.0)
        assert push.is_alive()
        engine.free.set()
        push.join(LIMIT_S)
        assert not push.is_alive()
        assert len(engine.pushes) == 1
        assert client.evaluate(0)
