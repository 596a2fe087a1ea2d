"""Intake processes in front of a real SGLang server: its records agree with Hugging Face, also when one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from moe_trm.config.schema import Config
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.process import Server
from moe_trm.runtime.shared_blocks import place_of
from moe_trm.types import RolloutRecord
from tests.integration.served import PARAMS, check_against_hf, load, make_push, prompts, with_engine


def test_answers_of_a_real_server_through_intake_processes(
    served_config: Config, rollout_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    load(served_config, rollout_server, make_push(tmp_path, tiny_moe, 0))
    rollout = served_config.rollout.model_copy(update={"intake_processes": 2})
    metrics: dict[str, float] = {}

    async def work(engine: ServerEngine) -> list[RolloutRecord]:
        pool = engine._intake
        assert pool is not None
        await pool.start()
        asking = asyncio.ensure_future(
            asyncio.gather(*(engine.generate(p, PARAMS, sample_id=i, group_id=i) for i, p in enumerate(prompts(32))))
        )
        while not all(process.num_open for process in pool._running):
            await asyncio.sleep(0.01)
        os.kill(pool.process_ids[0], signal.SIGKILL)
        records = await asking
        metrics.update(engine.metrics())
        return list(records)

    records = with_engine(served_config.model_copy(update={"rollout": rollout}), rollout_server, work)
    assert [record.sample_id for record in records] == list(range(32))
    assert all(place_of(record.tokens) is not None for record in records)
    assert all(record.versions.tolist() == [0] * record.num_sampled for record in records)
    for record in records[:2]:
        check_against_hf(record, tiny_moe)
    assert metrics["rollout/intake_losses"] == 1
    assert metrics["rollout/intake_reissued"] >= 1
