"""Rollout functions in a process of their own: what they make, and that one which fails costs its own sample only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_trm.errors import ConfigError, EngineError
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.rollout.sessions.function_sampler import ADAPTER, FunctionSampler
from moe_trm.runtime.functions.host import FunctionHost
from moe_trm.runtime.patience import patient
from moe_trm.sync.manifest import WeightPush
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import RolloutRecord, SamplingParams
from tests.unit.rollout import moods
from tests.unit.rollout.causal_engine import END, CausalEngine, DigitTokens
from tests.unit.rollout.moods import Outcomes, lost, reasons, together

FUNCTION = """
import asyncio, os, time
from moe_trm.rollout.sessions.session import Session, SessionEnded

async def rollout(session: Session):
    mood = session.prompt.extra["mood"]
    print("what a rollout prints does no harm")
    if mood == "never samples":
        return None
    turn = await session.sample(max_new_tokens=3)
    assert turn == session.turns[-1] and len(turn.token_ids) <= 3
    match mood:
        case "raises": raise KeyError("no such tool")
        case "waits": await asyncio.sleep(1000)
        case "blocks": time.sleep(1000)
        case "crashes": os._exit(3)
        case "is silly": await session.append(3)
        case "returns text": return "good"
        case "returns nan": return float("nan")
        case "swallows":
            try: await session.append_ids([99])
            except Exception: pass
        case "rewards": return {"tool": 2, "style": 0.5}
        case "goes on":
            while True:
                await session.append("9")
                await session.sample()
        case "catches":
            try:
                while True: await session.sample()
            except SessionEnded:
                return 7.0
    await session.append("42")
    await session.sample(stop=("9", "f"))
"""
REASONS = {
    "never samples": "empty_output",
    "raises": "rollout_error",
    "waits": "rollout_timeout",
    "blocks": "rollout_timeout",
    "crashes": "rollout_crash",
    "is silly": "rollout_error",
    "returns text": "rollout_type",
    "returns nan": "rollout_nan",
}


class MoodTask(moods.MoodTask):
    tokens: Tokens = DigitTokens()


class WholeEngine(CausalEngine):
    """Takes any weights."""

    async def load_weights(self, push: WeightPush) -> None: ...


def sampler(folder: Path, engine: CausalEngine, task: MoodTask, *, turns: int = 4) -> FunctionSampler:
    path = folder / "own_rollout.py"
    path.write_text(FUNCTION)
    host = FunctionHost(f"{path}:rollout", adapter=ADAPTER, key="rollout.function", limit_s=patient(1.0))
    params = SamplingParams(top_k=16, max_new_tokens=6, stop_token_ids=(END,))
    return FunctionSampler(host, engine, task, params, Limits(turns, 100), keep_changed=False)


def outcomes(folder: Path, names: Sequence[str], engine: CausalEngine | None = None) -> Outcomes:
    return together(sampler(folder, engine or CausalEngine(), MoodTask(names)), names)[0]


def test_each_way_to_fail_rejects_its_own_sample_under_its_own_reason(tmp_path: Path) -> None:
    found = outcomes(tmp_path, ["plays", *REASONS, "swallows"])
    records = {mood: value for mood, value in found.items() if isinstance(value, RolloutRecord)}
    assert reasons(found) == REASONS
    assert records.keys() == {"plays", "swallows"}
    for record in records.values():
        assert record.turn_ids.max() == 1
        assert record.reward == 2.0


def test_a_function_may_give_the_reward_itself(tmp_path: Path) -> None:
    record = outcomes(tmp_path, ["rewards"])["rewards"]
    assert isinstance(record, RolloutRecord)
    assert record.reward == 2 + 4 * 0.5
    assert record.reward_parts == {"tool": 2.0, "style": 0.5}


def test_a_sample_that_a_limit_ends_is_kept_as_unfinished(tmp_path: Path) -> None:
    found = outcomes(tmp_path, ["goes on", "catches"])
    for record in found.values():
        assert isinstance(record, RolloutRecord)
        assert record.finish_reason == "length"
        assert record.turn_ids.max() == 3
    assert found["catches"].reward == 7.0


def test_a_lost_engine_stops_the_run_even_if_the_function_would_not_mind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalEngine, "turn", lost)
    with pytest.raises(EngineError, match="not reachable"):
        outcomes(tmp_path, ["catches"])


def test_a_function_that_does_not_await_is_refused_at_launch(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("def rollout(session): ...")
    host = FunctionHost(f"{path}:rollout", adapter=ADAPTER, key="rollout.function", limit_s=patient(1.0))
    with pytest.raises(ConfigError, match="await its session"):
        asyncio.run(host.start())
