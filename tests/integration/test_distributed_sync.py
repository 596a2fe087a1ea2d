"""Two senders broadcast their own tensors into a real server, with the same proof as a push through files."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
from safetensors.torch import load_file

from moe_trm.errors import SyncError
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.process import Server
from moe_trm.rollout.sglang.broadcast import DistributedPush
from moe_trm.rollout.sglang.checksum import EngineChecksums
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.sync.distributed import Sender, announce
from moe_trm.sync.manifest import Share
from moe_trm.sync.rounding import Rounding
from tests.integration.jobs import metrics_of, run_job, write_config

Tensors = dict[str, torch.Tensor]
WHOLE = EngineShape("float32")
EXPERT = "model.layers.1.mlp.experts.6.down_proj.weight"


def shares_of(checkpoint: Path) -> list[Tensors]:
    """Two ranks of expert parallelism: shared tensors and experts 0-3 on the first, experts 4-7 on the second."""
    ranks: list[Tensors] = [{}, {}]
    for name, tensor in sorted(load_file(checkpoint / "model.safetensors").items()):
        is_late_expert = ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) >= 4
        ranks[is_late_expert][name] = tensor
    return ranks


@contextmanager
def in_threads(*work: threading.Thread) -> Iterator[None]:
    for thread in work:
        thread.start()
    yield
    for thread in work:
        thread.join(timeout=300)
        assert not thread.is_alive()


def push(
    server: Server, version: int, announced: list[Tensors], sent: list[Tensors], group: str, shape: EngineShape = WHOLE
) -> float:
    """Push `sent` after announcing `announced`; seconds of the load, groups not included."""
    receivers = shape.ranks.total + 1
    senders = [Sender(f"{group}{rank}", receivers=receivers, timeout_s=300) for rank in range(len(sent))]
    shares = [
        Share(s.meeting, announce(t.items(), Rounding("float32"))) for s, t in zip(senders, announced, strict=True)
    ]

    async def run() -> float:
        async with EngineHttp(server.url, server.api_key, timeout_s=300, max_attempts=1) as api:
            control = DistributedPush(api, shape.ranks.total, timeout_s=300)
            with in_threads(*(threading.Thread(target=sender.connect) for sender in senders)):
                await control.join([sender.meeting for sender in senders])
            started = time.perf_counter()
            try:
                with in_threads(
                    *(
                        threading.Thread(target=s.send, args=(t.items(), Rounding("float32")))
                        for s, t in zip(senders, sent, strict=True)
                    )
                ):
                    await control.load(str(version), shares, shape)
            finally:
                await control.close()
            return time.perf_counter() - started

    return asyncio.run(run())


def served_checksums(server: Server) -> dict[str, str]:
    async def run() -> dict[str, str]:
        async with EngineHttp(server.url, server.api_key, timeout_s=300, max_attempts=1) as api:
            answer = await api.post("/weights_checker", {"action": "checksum"})
            return dict(answer["ranks"][0]["checksums"])

    return asyncio.run(run())


def test_owners_send_their_own_tensors_and_the_engine_proves_them(
    rollout_server: Server, tiny_moe: Path, other_moe: Path
) -> None:
    for version, checkpoint in ((11, other_moe), (12, tiny_moe)):
        ranks = shares_of(checkpoint)
        print(f"distributed push: {push(rollout_server, version, ranks, ranks, f'ok{version}-'):.3f} s")
        whole = ranks[0] | ranks[1]
        expected = EngineChecksums(whole, EngineShape("float32"))
        for name, tensor in whole.items():
            expected.add(name, tensor)
        assert [served_checksums(rollout_server)] == expected.result()


def test_a_tensor_that_changed_on_the_way_is_refused(rollout_server: Server, tiny_moe: Path) -> None:
    announced, sent = shares_of(tiny_moe), shares_of(tiny_moe)
    sent[1][EXPERT] = sent[1][EXPERT] + torch.eye(64) * 1e-6
    with pytest.raises(SyncError, match=r"layers\.1\.mlp\.experts\.6\.down_proj"):
        push(rollout_server, 13, announced, sent, "bad-")


def test_a_broadcast_succeeds_while_the_engine_generates_for_others(rollout_server: Server, tiny_moe: Path) -> None:
    """A request is running each time: the engine refuses to flush its prefix cache while one does."""
    ranks = shares_of(tiny_moe)
    for version in range(21, 24):
        with running_request(rollout_server) as answer:
            push(rollout_server, version, ranks, ranks, f"busy{version}-")
            assert answer.readline()  # it goes on
    expected = EngineChecksums(ranks[0] | ranks[1], EngineShape("float32"))
    for name, tensor in (ranks[0] | ranks[1]).items():
        expected.add(name, tensor)
    assert [served_checksums(rollout_server)] == expected.result()


@contextmanager
def running_request(server: Server) -> Iterator[HTTPResponse]:
    """A long answer of which the first token has come; given up at the end."""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}, "stream": True}
    request = Request(
        f"{server.url}/generate",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {server.api_key}", "Content-Type": "application/json"},
    )
    with urlopen(request, timeout=300) as answer:
        assert answer.readline()
        yield answer


@pytest.mark.long
def test_a_run_that_pushes_by_broadcast(tmp_path: Path, brief_checkpoint: Path, attached: list[str]) -> None:
    """Two expert-parallel ranks broadcast their weights after every step; the engine's checksums are compared."""
    config = write_config(tmp_path, brief_checkpoint)
    assert run_job(config, [*attached, "sync.method=distributed", "train.steps=2"]) == 0
    rows = metrics_of(tmp_path / "runs" / "live")
    assert [row["weights/version"] for row in rows[1:]] == [1, 2]
    assert rows[2]["ledger/trained"] == 32


@pytest.mark.slow
@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_a_run_that_pushes_from_an_uneven_pipeline(
    tmp_path: Path, brief_checkpoint: Path, attached: list[str], method: str
) -> None:
    """Sampling is two versions ahead; the embedding, three layers, one layer, and the loss are on four stages."""
    config, stages = write_config(tmp_path, brief_checkpoint), "learner.parallel.pipeline_layout=E|ttt|t|L"
    parallel = ["learner.parallel.expert=1", "learner.parallel.pipeline=2", stages, "learner.micro_batch_rows=2"]
    ahead = ["pipeline.mode=async", "pipeline.max_staleness=2", "train.steps=4"]
    assert run_job(config, [*attached, *parallel, *ahead, f"sync.method={method}", "pipeline.partial=wait"]) == 0
    rows = metrics_of(tmp_path / "runs" / "live")
    assert [row["weights/version"] for row in rows[1:]] == [1, 2, 3, 4]
    assert max(row["rollout/age_max"] for row in rows[1:]) == 2
    assert rows[4]["ledger/trained"] == 64
    assert all(row["replay/applied_fraction"] == 1.0 for row in rows[1:])
