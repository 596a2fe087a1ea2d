"""Servers whose checksums are not predicted: every push is proved by use, and the run says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_trm.errors import SyncError
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.backend import Requirements
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.question import RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.checks import ServerCheck
from moe_trm.rollout.sglang.engine_tensors import EngineShape
from moe_trm.rollout.sglang.slices import Ranks
from moe_trm.step.fixed_texts import FixedTexts
from moe_trm.sync.manifest import ScoredText, WeightPush
from tests.unit.doubles import StandInLearner
from tests.unit.rollout.test_sglang_engine import config

MODEL = ServedModel("Qwen3MoeForCausalLM", 8, 2, (0, 1), 4, 2, num_kv_heads=2)


class Reports(EngineHttp):
    """A server of which these ranks say what they hold."""

    def __init__(self, *ranks: int) -> None:
        super().__init__("http://server", None, timeout_s=1, max_attempts=1)
        self._ranks = ranks

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        assert (path, body) == ("/weights_checker", {"action": "checksum"})
        return {"ranks": [{"parallelism_info": [{"tp_rank": n}], "checksums": {}} for n in self._ranks]}


def shape(server: Mapping[str, Any], *ranks: int) -> EngineShape | None:
    fields = RequestedFields(routes=True, mask=True)
    check = ServerCheck(Requirements(MODEL, fields, 1.0, "bfloat16", verify=True, tensor_parallel=2))
    return asyncio.run(check._shape(Reports(*ranks), server))


def test_a_server_whose_every_rank_reports_is_predicted(caplog: pytest.LogCaptureFixture) -> None:
    found = shape({"device": "cuda", "tp_size": 2}, 0, 1)
    assert found is not None
    assert found.ranks == Ranks(2, *[2] * 6)
    assert shape({"device": "cuda", "tp_size": 2}, 0, 1, 0, 1) == found  # two groups of attention
    assert not caplog.records


@pytest.mark.parametrize(
    ("server", "ranks", "reason"),
    [
        ({"tp_size": 2, "moe_a2a_backend": "deepep"}, (0, 1), "moe_a2a_backend=deepep"),
        ({"tp_size": 2, "pp_size": 2}, (0, 1), "pp_size=2"),
        ({"tp_size": 2, "device": "hpu"}, (0, 1), "device=hpu"),
        ({"tp_size": 2}, (0,), "ranks [0] of 2"),
    ],
)
def test_another_is_not_and_the_log_says_why(
    server: Mapping[str, Any], ranks: tuple[int, ...], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert shape(server, *ranks) is None
    assert "every push is proved by use" in caplog.text
    assert reason in caplog.text


def test_without_texts_nothing_would_prove_a_push_to_it(tmp_path: Path) -> None:
    engine = ServerEngine(config(tmp_path), "key")
    assert "weights/unpredicted" not in engine.metrics()
    engine._client._shapes = {"http://server": None}  # type: ignore[attr-defined]
    assert engine.metrics()["weights/unpredicted"] == 1
    push = WeightPush(0, str(tmp_path), ())
    with pytest.raises(SyncError, match="nothing would prove"):
        asyncio.run(engine.load_weights(push))
    engine._check_provable((ScoredText((1, 2)),))
    unproved = ServerEngine(config(tmp_path, sync={"verify": False}), "key")
    unproved._client._shapes = {"http://server": None}  # type: ignore[attr-defined]
    unproved._check_provable(())
    assert "weights/unpredicted" not in unproved.metrics()


def test_texts_come_with_every_push_that_needs_them_unless_they_are_off() -> None:
    texts, learner = FixedTexts(50, 100, scored=False), StandInLearner()
    taken = [bool(texts.take(learner, due=number == 5)) for number in range(7)]
    assert taken == [True, True, True, False, False, True, False]
    assert FixedTexts(50, 0, scored=False).take(learner, due=True) == ()
