"""Beside vLLM: the door before its API server, and the loader in its workers. A scripted engine stands for vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_trm.sync.distributed import Sender, announce, buckets_of
from moe_trm.sync.manifest import Share
from moe_trm.sync.rounding import Rounding
from moe_trm.sync.tensors import tensor_digest

WORKER = Path(__file__).parents[3] / "packages" / "vllm_worker" / "moe_trm_vllm_worker"
ANSWER = b'{"choices":[]}'


def module(name: str) -> ModuleType:
    """The module as it stands in the repository: it is installed in vLLM's environment alone."""
    spec = importlib.util.spec_from_file_location(f"vllm_worker_{name}", WORKER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class ScriptedVllm:
    """vLLM's application and its engine client: what was asked of it, in order."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.bodies: list[bytes] = []
        self.emptied, self.digests = True, [{"a": "1"}]
        self.refused = ""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        self.asked.append(scope["path"])
        self.bodies.append((await receive())["body"])
        await self.may_answer.wait()
        headers = [(b"content-length", str(len(ANSWER)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, str]]:
        self.asked.append((method, *args))
        if method == self.refused:
            raise ValueError("a worker refuses")
        if args == ("empty",):
            raise ValueError("no safetensors files in empty")
        return self.digests

    async def reset_prefix_cache(self) -> bool:
        self.asked.append("reset")
        return self.emptied

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.asked.append((mode, clear_cache))
        self.may_answer.set()

    async def resume_generation(self) -> None:
        self.asked.append("resume")


class Client:
    """Requests to a door in front of a `ScriptedVllm`."""

    def __init__(self, door: Any, vllm: ScriptedVllm) -> None:
        self._door, self._app = door, SimpleNamespace(state=SimpleNamespace(engine_client=vllm))

    async def ask(self, path: str, body: object = None, key: str = "k", kind: str = "http") -> tuple[int, bytes]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps(body).encode()}

        method = "GET" if body is None else "POST"
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        scope = {"type": kind, "path": path, "method": method, "headers": headers, "app": self._app}
        await self._door(scope, receive, send)
        if kind != "http":
            return sent[0]["code"], b""
        length = dict(sent[0]["headers"])[b"content-length"]
        assert int(length) == len(sent[1]["body"])
        return sent[0]["status"], sent[1]["body"]

    async def push(self, version: int, folder: str = "f") -> tuple[int, Any]:
        status, body = await self.ask("/moe_trm/weights", {"folder": folder, "version": str(version)})
        return status, json.loads(body)

    async def version(self) -> str:
        """Of an answer."""
        return str(json.loads((await self.ask("/inference/v1/generate", {}))[1])["weight_version"])


@pytest.fixture
def with_door(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    monkeypatch.setenv("MOE_TRM_API_KEY", "k")

    def run(work: Callable[[Client, ScriptedVllm], Awaitable[None]]) -> None:
        async def main() -> None:
            vllm = ScriptedVllm()
            async with asyncio.timeout(30):
                await work(Client(module("door").Door(vllm), vllm), vllm)

        asyncio.run(main())

    return run


def test_all_but_the_health_check_needs_the_key(with_door: Any) -> None:
    async def work(client: Client, vllm: ScriptedVllm) -> None:
        for path in ("/inference/v1/generate", "/v1/models", "/metrics", "/moe_trm/weights", "/collective_rpc"):
            for key in ("", "other"):
                assert (await client.ask(path, {}, key=key))[0] == 401
        assert (await client.ask("/v1/models", kind="websocket"))[0] == 1008
        assert vllm.asked == []
        assert await client.ask("/health", key="") == (200, ANSWER)
        assert await client.ask("/v1/models") == (200, ANSWER)

    with_door(work)


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_TRM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="MOE_TRM_API_KEY"):
        module("door").Door(None)


def test_an_answer_has_the_version_of_the_last_push(with_door: Any) -> None:
    async def work(client: Client, vllm: ScriptedVllm) -> None:
        assert await client.version() == "none"
        assert await client.push(3) == (200, {"version": "3", "workers": [{"a": "1"}]})
        assert await client.version() == "3"
        assert vllm.asked[1:3] == [("moe_trm_load", "f"), "reset"]

    with_door(work)


def test_an_answer_has_the_ids_that_its_request_continues(with_door: Any) -> None:
    async def work(client: Client, vllm: ScriptedVllm) -> None:
        for request, prompt in (({"token_ids": [5, 6]}, [5, 6]), ({"token_ids": [7]}, [7]), ([1], None)):
            _, body = await client.ask("/inference/v1/generate", request)
            assert json.loads(body) == {"weight_version": "none", "prompt_token_ids": prompt, "choices": []}
            assert json.loads(vllm.bodies[-1]) == request

    with_door(work)


def test_a_push_waits_for_answers_and_answers_wait_for_it(with_door: Any) -> None:
    async def work(client: Client, vllm: ScriptedVllm) -> None:
        await client.push(1)
        vllm.may_answer.clear()
        first = asyncio.create_task(client.version())
        await asyncio.sleep(0.01)
        push = asyncio.create_task(client.push(2))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(client.version())
        await asyncio.sleep(0.05)
        assert vllm.asked.count(("moe_trm_load", "f")) == 1
        vllm.may_answer.set()
        assert (await first, (await push)[0], await second) == ("1", 200, "2")
        loaded = len(vllm.asked) - 1 - vllm.asked[::-1].index(("moe_trm_load", "f"))
        assert vllm.asked[loaded:] == [("moe_trm_load", "f"), "reset", "/inference/v1/generate"]

    with_door(work)


def test_answers_that_are_held_wait_for_the_next_push_even_if_it_fails(with_door: Any) -> None:
    async def work(client: Client, vllm: ScriptedVllm) -> None:
        for version, status in ((1, 200), (2, 400)):
            assert (await client.ask("/moe_trm/hold", {}))[0] == 200
            answer = asyncio.create_task(client.version())
            await asyncio.sleep(0.02)
            assert not answer.done()
            vllm.emptied = status == 200
            assert (await client.push(version))[0] == status
            assert await answer == ("1" if status == 200 else "none")

    with_door(work)


def test_an_abort_ends_what_a_push_waits_for(with_door: Any) -> None:
    async def work(client: Client, vllm: ScriptedVllm) -> None:
        vllm.may_answer.clear()
        answer = asyncio.create_task(client.version())
        await asyncio.sleep(0.01)
        push = asyncio.create_task(client.push(2))
        await asyncio.sleep(0.01)
        assert (await client.ask("/moe_trm/abort", {}))[0] == 200
        assert ((await answer), (await push)[0]) == ("none", 200)
        assert vllm.asked[1:3] == [("abort", False), "resume"]

    with_door(work)


def test_a_prefix_cache_that_is_not_emptied_and_a_folder_without_tensors_fail_the_push(with_door: Any) -> None:
    async def work(client: Client, vllm: ScriptedVllm) -> None:
        for emptied, folder, said in ((False, "f", "prefix cache"), (True, "empty", "no safetensors files in empty")):
            assert (await client.push(1))[0] == 200
            vllm.emptied = emptied
            status, told = await client.push(2, folder)
            assert (status, said in told["error"]) == (400, True)
            assert await client.version() == "none"
            vllm.emptied = True

    with_door(work)


def test_a_broadcast_is_a_push_to_workers_that_have_joined(with_door: Any) -> None:
    async def work(client: Client, vllm: ScriptedVllm) -> None:
        meetings, buckets = [["rank-0", "127.0.0.1", 1]], [["rank-0", [["a", "float32", [1]]]]]
        assert (await client.ask("/moe_trm/join", {"meetings": meetings}))[0] == 200
        assert (await client.ask("/moe_trm/weights", {"buckets": buckets, "version": "4"}))[0] == 200
        assert await client.version() == "4"
        assert vllm.asked[:3] == [("moe_trm_join", meetings), ("moe_trm_receive", buckets), "reset"]
        vllm.refused = "moe_trm_join"
        assert (await client.ask("/moe_trm/join", {"meetings": meetings}))[0] == 400

    with_door(work)


class ScriptedRunner:
    """vLLM's model runner: `reload_weights` alone loads; the live model's own loader would fail midway."""

    def __init__(self, *methods: SimpleNamespace) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.model = torch.nn.Sequential(*(torch.nn.Identity() for _ in methods))
        for layer, method in zip(self.model, methods, strict=True):
            layer.__dict__["quant_method"] = method
        self.kernels: list[object] = []

    def get_model(self) -> torch.nn.Module:
        return self.model

    def reload_weights(self, *, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.kernels = [layer.quant_method.moe_kernel for layer in self.model]
        self.loaded = dict(weights_iterator)


def loading(runner: ScriptedRunner, folder: Path) -> Any:
    loader = module("loader").WeightLoader()
    loader.model_runner = runner
    return loader.moe_trm_load(str(folder))


def test_the_digests_are_those_of_a_manifest(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(2, 8).bfloat16(), "c": torch.tensor(2.0)}
    save_file({"a": tensors["a"]}, tmp_path / "model-0.safetensors")
    save_file({name: tensors[name] for name in "bc"}, tmp_path / "model-1.safetensors")
    runner = ScriptedRunner()
    assert loading(runner, tmp_path) == {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    assert runner.loaded.keys() == tensors.keys()


def test_what_a_learner_rank_broadcasts_is_loaded_and_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"a": torch.randn(3, 4), "b": torch.randn(2, 8)}, {"c": torch.tensor([2.0])}]
    rounding = Rounding("bfloat16")
    senders = [Sender(f"rank-{number}", receivers=1) for number in range(2)]
    runner = ScriptedRunner()
    loader = module("loader").WeightLoader()
    loader.model_runner = runner
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    announced = [announce(own.items(), rounding) for own in ranks]
    with ThreadPoolExecutor(2) as threads:
        joined = [threads.submit(sender.connect) for sender in senders]
        loader.moe_trm_join([(s.meeting.group, s.meeting.address, s.meeting.port) for s in senders])
        for one in joined:
            one.result()
        for sender, own in zip(senders, ranks, strict=True):
            threads.submit(sender.send, own.items(), rounding)
        buckets = [
            (s.meeting.group, [(e.name, e.dtype, list(e.shape)) for e in bucket])
            for s, entries in zip(senders, announced, strict=True)
            for bucket in buckets_of(Share(s.meeting, entries))
        ]
        assert [len(bucket) for _, bucket in buckets] == [2, 1]
        assert loader.moe_trm_receive(buckets) == {e.name: e.digest for entries in announced for e in entries}
    for name, tensor in (ranks[0] | ranks[1]).items():
        assert torch.equal(runner.loaded[name], tensor.bfloat16())


def test_a_server_of_several_workers_joins_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="one worker"):
        module("loader").WeightLoader().moe_trm_join([])


def test_experts_of_a_cpu_are_set_up_again(tmp_path: Path) -> None:
    """Else they stay unpacked, and the kernel misreads them without a word."""
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    cpu, gpu = (
        SimpleNamespace(unquantized_backend=SimpleNamespace(name=name), moe_kernel="k") for name in ("CPU", "T")
    )
    runner = ScriptedRunner(cpu, gpu, SimpleNamespace(moe_kernel="none of the experts"))
    loading(runner, tmp_path)
    assert runner.kernels == [None, "k", "none of the experts"]


def test_a_folder_without_tensors_or_with_one_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no safetensors"):
        loading(ScriptedRunner(), tmp_path)
    for number in (0, 1):
        save_file({"a": torch.zeros(1)}, tmp_path / f"model-{number}.safetensors")
    with pytest.raises(ValueError, match="twice"):
        loading(ScriptedRunner(), tmp_path)
