"""Books that balance whatever users' functions and agents do, and whatever rows their samples become."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_trm.config.schema import Config
from moe_trm.config.schema.agent import AgentRows
from moe_trm.rollout.agents import live_session
from moe_trm.rollout.agents.agent_sampler import AgentSampler
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.sessions.function_sampler import FunctionSampler
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import SamplingParams
from tests.unit.rollout import test_function_sampler as functions
from tests.unit.rollout.agents import test_agent_sampler as agents
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine


@dataclass(frozen=True)
class Kind:
    """A way of making samples: what the moods of its examples end in."""

    reasons: Mapping[str, str]
    trained: tuple[str, ...]
    rows: AgentRows | None = None

    @property
    def moods(self) -> list[str]:
        return [*self.reasons, *self.trained]

    def parts(self, folder: Path) -> tuple[Any, Any, AgentSampler | FunctionSampler]:
        """Engine, task and sampler."""
        if self.rows is None:
            engine, task = functions.WholeEngine(), functions.MoodTask(self.moods)
            return engine, task, functions.sampler(folder, engine, task)
        speaking, mood = SpeakingEngine(agents.speak), agents.MoodTask(self.moods)
        return speaking, mood, agents.sampler(folder, speaking, mood, rows=self.rows)


# Agents that wait cost their time limit each, and are tried one by one elsewhere.
QUICK = {mood: reason for mood, reason in agents.REASONS.items() if reason != "rollout_timeout"}
TALKS = ("plays", "goes on", "rewards", "forgets")
KINDS = {
    "functions": Kind(functions.REASONS, ("plays", "goes on", "rewards", "catches")),
    "agents, the last branch": Kind(QUICK, TALKS, "last"),
    "agents, every branch": Kind(QUICK, TALKS, "trajectory"),
    "agents, every answer": Kind(QUICK, TALKS, "turns"),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_sample_is_trained_once_or_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_session, "MAX_REFUSED", 20)
    kind = KINDS[name]
    config = Config.model_validate(
        {
            "model": {"checkpoint": "unused"},
            "rollout": {"prompts_per_step": len(kind.moods), "group_size": 2},
            "learner": {"minibatches": 1},
            "batch": {"refill_limit": 1},
        }
    )

    async def go() -> tuple[Mapping[str, float], int, int]:
        engine, task, made = kind.parts(tmp_path)
        await made.start()
        controller = RolloutController(config, engine, task, SamplingParams(top_k=16), made)
        try:
            await controller.load_weights(WeightPush(0, "", ()))
            [share] = await controller.plan(1, data_size=1)
        finally:
            await controller.close()
        [mini] = share.mini_batches
        return share.metrics, mini.num_sequences, sum(len(micro.rows) for micro in mini.micro_batches)

    metrics, num_sequences, num_rows = asyncio.run(asyncio.wait_for(go(), 120))
    places = ("queued", "in_flight", "trained", "rejected", "dropped")
    assert metrics["ledger/issued"] == sum(metrics[f"ledger/{place}"] for place in places) == 2 * len(kind.moods)
    for reason in set(kind.reasons.values()):
        assert metrics[f"records/rejected/{reason}"] == 2 * list(kind.reasons.values()).count(reason)
    assert metrics["ledger/trained"] == num_sequences == 2 * len(kind.trained) == 8
    # Four answers of what goes on, one of what rewards, two of each other; what forgets has them in two branches.
    answers = {"last": 2 * 8, "trajectory": 2 * 9, "turns": 2 * 9}
    assert metrics["turns/max"] == 4
    assert 0 < metrics["turns/later_token_fraction"] < 1
    assert metrics["reward/tool/mean"] == 2.0
    if kind.rows is None:
        assert num_rows == 8
        return
    assert metrics["turns/mean"] == answers[kind.rows] / 8
    assert num_rows == metrics["agent/rows"] == {"last": 8, "trajectory": 10, "turns": 18}[kind.rows]
    assert (metrics["agent/left_out_tokens"] > 0) == (kind.rows == "last")
    assert metrics.get("turns/rows_max") == {"last": None, "trajectory": 2, "turns": 4}[kind.rows]
    assert metrics["agent/sessions"] == 2 * len(kind.moods)
    assert metrics["agent/branches"] > metrics["ledger/trained"]
