"""A push over real groups, with an engine of several ranks in threads: who joins, who receives, and who notices."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from moe_trm.errors import SyncError
from moe_trm.rollout.sglang.broadcast import DistributedPush
from moe_trm.runtime.patience import patient
from moe_trm.sync.distributed import BUCKET_BYTES, Sender, announce, broadcast, join_group
from moe_trm.sync.manifest import Share
from moe_trm.sync.rounding import DTYPES, Rounding
from tests.unit.sync.nccl_rules import Group, NcclRules

WEIGHTS = {"model.norm.weight": torch.arange(4.0), "lm_head.weight": torch.full((2, 3), 0.1)}
TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def nccl_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every push of these tests keeps NCCL's rules, but for the place of its bytes."""
    joining = NcclRules().joining(join_group)
    for place in ("moe_trm.sync.distributed", "moe_trm.rollout.sglang.broadcast", __name__):
        monkeypatch.setattr(f"{place}.join_group", joining)


class Engine:
    """Ranks that join and receive as the requests say. The weights of each are in `held`."""

    def __init__(self, num_ranks: int, workers: ThreadPoolExecutor) -> None:
        self.held: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]
        self.buckets: list[list[list[str]]] = [[] for _ in range(num_ranks)]
        self._groups: dict[str, list[ProcessGroupGloo]] = {}
        self._workers, self._label = workers, ""

    async def get(self, path: str) -> Any:
        assert path == "/model_info"
        return {"weight_version": self._label}

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        if path == "/init_weights_update_group":
            self._groups[body["group_name"]] = await self._on_every_rank(self._join, body)
        if path == "/update_weights_from_distributed":
            await self._on_every_rank(self._receive, body)
            self._label = body.get("weight_version", self._label)
        return {"success": True}

    async def _on_every_rank(self, work: Any, body: Mapping[str, Any]) -> list[Any]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(
            *(loop.run_in_executor(self._workers, work, rank, body) for rank in range(len(self.held)))
        )

    def _join(self, rank: int, body: Mapping[str, Any]) -> ProcessGroupGloo:
        timeout = timedelta(seconds=patient(TIMEOUT_S))
        address, port = body["master_address"], body["master_port"]
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        return join_group(store, body["group_name"], body["rank_offset"] + rank, body["world_size"], timeout)

    def _receive(self, rank: int, body: Mapping[str, Any]) -> None:
        assert body["load_format"] == "flattened_bucket"
        self.buckets[rank].append(body["names"])
        places, size = {}, 0
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            assert size % DTYPES[dtype].itemsize == 0, "SGLang refuses a tensor that is not aligned"
            num_bytes = torch.Size(shape).numel() * DTYPES[dtype].itemsize
            places[name], size = (size, num_bytes, DTYPES[dtype], shape), size + num_bytes
        data = torch.empty(size, dtype=torch.uint8)
        broadcast(self._groups[body["group_name"]][rank], data)
        for name, (begin, num_bytes, kind, shape) in places.items():
            self.held[rank][name] = data[begin : begin + num_bytes].view(kind).reshape(shape)


def push(
    num_ranks: int,
    announced: list[dict[str, Tensor]],
    sent: list[dict[str, Tensor]],
    bucket_bytes: int = BUCKET_BYTES,
) -> Engine:
    """The engine after a push of `sent`, a dictionary for each sender."""
    rounding = Rounding("bfloat16")
    senders = [
        Sender(f"group{number}", receivers=num_ranks + 1, timeout_s=TIMEOUT_S, bucket_bytes=bucket_bytes)
        for number in range(len(sent))
    ]
    shares = [Share(s.meeting, announce(own.items(), rounding)) for s, own in zip(senders, announced, strict=True)]

    async def run(engine: Engine) -> None:
        control = DistributedPush(engine, num_ranks, TIMEOUT_S)
        joined: list[Future[None]] = [workers.submit(sender.connect) for sender in senders]
        await control.join([sender.meeting for sender in senders])
        for one in joined:
            one.result()
        given = [workers.submit(s.send, own.items(), rounding) for s, own in zip(senders, sent, strict=True)]
        try:
            await control.load("7", shares, None)
        finally:
            for one in given:
                one.result()
            await control.close()

    with ThreadPoolExecutor(2 * num_ranks + 2 * len(sent)) as workers:
        engine = Engine(num_ranks, workers)
        asyncio.run(run(engine))
    return engine


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_rank_of_the_engine_has_what_every_sender_sent(num_ranks: int) -> None:
    parts = [{name: tensor} for name, tensor in WEIGHTS.items()]
    for held in push(num_ranks, parts, parts).held:
        assert held.keys() == WEIGHTS.keys()
        for name, tensor in WEIGHTS.items():
            assert torch.equal(held[name], tensor.bfloat16())


def test_tensors_travel_in_buckets_in_which_each_is_aligned() -> None:
    """A bucket ends before it has more than 24 bytes, and before an element that would be at no place for it."""
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"  # float32 among bfloat16
    weights = {"a": torch.ones(5), bias: torch.arange(2.0), "b": torch.ones(8), "c": torch.ones(1), "d": torch.ones(20)}
    engine = push(2, [weights], [weights], bucket_bytes=24)
    assert engine.buckets == [[["a"], [bias, "b"], ["c"], ["d"]]] * 2
    for name, tensor in weights.items():
        assert torch.equal(engine.held[1][name], tensor if name == bias else tensor.bfloat16())


def test_the_witness_names_the_tensor_that_is_not_the_announced_one() -> None:
    changed = {**WEIGHTS, "lm_head.weight": WEIGHTS["lm_head.weight"] + 1}
    with pytest.raises(SyncError, match="changed between the learner's memory") as caught:
        push(2, [WEIGHTS], [changed])
    assert caught.value.got == "lm_head.weight"


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([("a", 0, torch.ones(4, 4).mT)], "not contiguous"),
        ([("a", 0, torch.ones(0))], "nothing to send"),
        ([("a", 0, torch.ones(4, dtype=torch.complex64))], "NCCL has no"),
        ([("a", 0, torch.ones(4)), ("a", 1, torch.ones(5))], "rank 1 makes"),
        ([("a", 0, torch.ones(4)), ("a", 1, torch.ones(4, dtype=torch.int32))], "rank 1 makes"),
        ([("a", 1, torch.ones(4)), ("b", 1, torch.ones(4)), ("b", 2, torch.ones(4))], "different orders"),
    ],
    ids=["strides", "empty", "type", "size", "another type", "order of groups"],
)
def test_what_nccl_would_hang_or_die_of_is_refused(calls: list[tuple[str, int, Tensor]], said: str) -> None:
    class Silent:
        def broadcast(self, _tensors: list[Tensor], _options: Any) -> Any:
            return Future()

    rules = NcclRules()
    ends: dict[tuple[str, int], Group] = {}

    def make() -> None:
        for name, rank, tensor in calls:
            end = ends.setdefault((name, rank), Group(rules, Silent(), name, rank))
            end.broadcast([tensor], torch.distributed.BroadcastOptions())

    with pytest.raises(AssertionError, match=said):
        make()
