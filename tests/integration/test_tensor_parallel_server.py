"""A real SGLang server of two ranks on a CPU: pushes through files and by broadcast, proved rank by rank."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_trm.config.schema import Config
from moe_trm.errors import EngineError, SyncError
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.sglang.disk_load import load_folder, verified_checksums
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.rollout.sglang.slices import Ranks
from tests.integration.served import EXPERT, EXPERT_FUSED, check_against_hf, make_push, prompts, texts_of, with_engine
from tests.integration.served import PARAMS as SAMPLED
from tests.integration.test_distributed_sync import push as broadcast_push
from tests.integration.test_distributed_sync import shares_of
from tests.integration.test_rollout_server import LoadsSomethingElse

pytestmark = pytest.mark.slow

SHAPE = EngineShape("float32", ranks=Ranks(2, *[2] * 6), kv_heads=2, num_experts=8)


@pytest.fixture(scope="module")
def config(rollout_config: Config) -> Config:
    server = rollout_config.rollout.server.model_copy(update={"tensor_parallel": 2})
    return rollout_config.model_copy(update={"rollout": rollout_config.rollout.model_copy(update={"server": server})})


@pytest.fixture(scope="module")
def server(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(Served.of(config), tmp_path_factory.mktemp("two_ranks") / "rollout.log", "key-of-two-ranks")
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def served(config: Config, server: Server) -> Config:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"url": server.url})})


def test_a_push_is_proved_on_both_ranks_and_by_use(
    served: Config, server: Server, other_moe: Path, tmp_path: Path
) -> None:
    push = msgspec.structs.replace(make_push(tmp_path, other_moe, 1), texts=texts_of(other_moe))

    async def work(engine: ServerEngine) -> None:
        await engine.start()
        await engine.load_weights(push)
        record = await engine.generate(prompts(1)[0], SAMPLED, sample_id=0, group_id=0)
        check_against_hf(record, other_moe)
        metrics = engine.metrics()
        assert "weights/unpredicted" not in metrics
        assert metrics["weights/learner_gap"] < 1e-3

    with_engine(served, server, work)


def test_one_element_that_one_rank_loads_otherwise_is_found(server: Server, tiny_moe: Path, tmp_path: Path) -> None:
    """The last row of an expert's matrix is on the second rank alone."""
    push = make_push(tmp_path / "meant", tiny_moe, 5)
    make_push(tmp_path / "loaded", tiny_moe, 5)
    path = tmp_path / "loaded" / "v000005" / "model-1.safetensors"
    tensors = load_file(path)
    tensors[EXPERT][-1, -1] = torch.nextafter(tensors[EXPERT][-1, -1], torch.tensor(1.0))
    save_file(tensors, path, metadata={"format": "pt"})

    async def run() -> None:
        async with LoadsSomethingElse(server.url, server.api_key, timeout_s=300, max_attempts=1) as api:
            api.folder = str(tmp_path / "loaded" / "v000005")
            await load_folder(api, push, asyncio.to_thread(verified_checksums, push, SHAPE))

    with pytest.raises(SyncError) as caught:
        asyncio.run(run())
    assert (caught.value.where, caught.value.got) == ("engine rank 1", f"1 differ: {EXPERT_FUSED}")


def test_both_ranks_take_a_broadcast(server: Server, tiny_moe: Path) -> None:
    ranks = shares_of(tiny_moe)
    broadcast_push(server, 12, ranks, ranks, "two-", SHAPE)


def test_a_server_of_another_number_of_ranks_is_refused(server: Server, rollout_config: Config) -> None:
    rollout = rollout_config.rollout.model_copy(update={"url": server.url})
    with pytest.raises(EngineError, match="another number of ranks") as caught:
        with_engine(rollout_config.model_copy(update={"rollout": rollout}), server, lambda engine: engine.start())
    assert caught.value.expected == "rollout.server.tensor_parallel=1"
