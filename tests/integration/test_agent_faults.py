"""A real server that is killed while agents are at work: their sessions go on, and every sample is trained once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from moe_trm.config.schema import Config
from moe_trm.rollout.agents.live_session import LiveSession
from moe_trm.rollout.build import build_controller
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.watchdog import Watchdog
from moe_trm.types import TrainBatch
from tests.drills.resume_drill import books_balance
from tests.integration.served import make_push
from tests.integration.test_agent_rows import AGENT, ANSWERS
from tests.integration.test_rollout_faults import KEY, RECOVERY_S
from tests.integration.test_rollout_faults import config as plain_config

GROUPS, GROUP_SIZE = 4, 8


def config(checkpoint: Path, folder: Path, url: str | None = None) -> Config:
    whole = plain_config(checkpoint, url)
    rollout = whole.rollout.model_copy(
        update={"agent": f"{folder / 'agent.py'}:run", "prompts_per_step": GROUPS, "group_size": GROUP_SIZE}
    )
    return whole.model_copy(update={"rollout": rollout, "agent": whole.agent.model_copy(update={"rows": "trajectory"})})


def open_sessions(controller: RolloutController) -> list[LiveSession]:
    server: Any = controller._sampler._server  # type: ignore[attr-defined]
    return [session for _, session in server._sessions.values()]


@pytest.mark.slow
def test_a_server_killed_with_agents_at_work_costs_no_sample(brief_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)

    async def drill(watchdog: Watchdog) -> tuple[list[TrainBatch], list[tuple[LiveSession, int]]]:
        controller = await build_controller(config(brief_checkpoint, tmp_path, watchdog.url), KEY)
        try:
            await controller.start()
            await controller.load_weights(make_push(tmp_path, brief_checkpoint, 0, "bfloat16"))
            planning = asyncio.ensure_future(controller.plan(1, data_size=1))
            while not [session for session in open_sessions(controller) if session.tree.nodes]:
                await asyncio.sleep(0.005)
            begun = [(session, len(session.tree.nodes)) for session in open_sessions(controller)]
            os.killpg(watchdog.server.process.pid, signal.SIGKILL)
            started = time.monotonic()
            while not controller._engine.metrics()["rollout/recoveries"]:
                await asyncio.sleep(0.1)
                assert time.monotonic() - started < 4 * RECOVERY_S
            [first] = await planning
            await controller.load_weights(make_push(tmp_path, brief_checkpoint, 1, "bfloat16"))
            [second] = await controller.plan(2, data_size=1)
            return [first, second], begun
        finally:
            await controller.close()

    with Watchdog(Served.of(config(brief_checkpoint, tmp_path)), tmp_path / "rollout.log", KEY) as watchdog:
        batches, begun = asyncio.run(drill(watchdog))
        assert watchdog.restarts == 1
    # Sessions with answers of the server that was killed went on behind them.
    assert any(0 < before < len(session.tree.nodes) == ANSWERS for session, before in begun)
    metrics = batches[-1].metrics
    assert metrics["rollout/reissued"] > 0
    rows = [
        row for batch in batches for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows
    ]
    samples: dict[int, list[int]] = {}
    for row in rows:
        samples.setdefault(row.record.sample_id, []).append(row.record.row)
        assert {turn.row for turn in row.record.session} >= {row.record.row}
        assert row.record.routes is not None
        row.record.routes.check_tokens(row.record.tokens, row.record.origin)
    assert all(sorted(own) == list(range(len(own))) for own in samples.values())
    assert len(samples) == metrics["ledger/trained"]
    assert all(books_balance([batch.metrics]) for batch in batches)
    assert metrics["ledger/trained"] + metrics["ledger/rejected"] == 2 * GROUPS * GROUP_SIZE
    assert metrics["ledger/rejected"] == metrics["ledger/dropped"] == 0
    assert metrics["agent/sessions"] == 2 * GROUPS * GROUP_SIZE
    assert metrics["agent/left_out_tokens"] == 0
