"""The fixed texts of a run: drawn once, kept by checkpoints, and scored at the weights of the step or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from moe_trm.config.schema import Config, ProbeConfig
from moe_trm.errors import EngineError
from moe_trm.rollout.rank_share import rank_share
from moe_trm.rollout.text_bank import TextBank, drawn
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import TrainBatch
from routing import RouteRecord, token_digest
from tests.unit.records import EXPERTS, LAYERS, TOP_K, make_record
from tests.unit.rollout.fake_engine import CONFIG, FakeEngine, controller_with


class ScoringEngine(FakeEngine):
    """Prefills with log-probs that count the tokens."""

    asked = 0

    async def prefilled(self, token_ids: Sequence[int], version: int) -> tuple[np.ndarray, RouteRecord]:
        if version != self.version:
            raise EngineError("no rollout server has these weights", got=self.version, expected=version)
        self.asked += 1
        rows = len(token_ids) - 1
        experts = np.broadcast_to(np.arange(TOP_K), (rows, len(LAYERS), TOP_K)).astype(np.uint8)
        routes = RouteRecord(experts, LAYERS, EXPERTS, token_digest(np.array(token_ids, np.int32)))
        return -np.arange(1.0, rows + 1), routes


def bank(engine: FakeEngine, number: int = 3) -> TextBank:
    return TextBank(ProbeConfig(every=4, bank=number), engine, seed=0)


SAMPLES = [make_record(sample_id=n, group_id=n // 4, num_sampled=3 + n) for n in range(8)]


def test_texts_are_of_as_many_prompts_as_possible_and_the_same_again() -> None:
    assert all({text.group_id for text in drawn(SAMPLES, 2, seed)} == {0, 1} for seed in range(9))
    five = drawn(SAMPLES, 5, 0)
    assert sorted(text.group_id for text in five) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])
    assert [text.tokens.tolist() for text in five] == [text.tokens.tolist() for text in drawn(SAMPLES, 5, 0)]
    assert len(drawn(SAMPLES, 99, 0)) == len(SAMPLES)


def test_the_same_texts_are_scored_at_the_first_step_and_at_probes_also_after_a_resumption() -> None:
    engine = ScoringEngine()
    first = asyncio.run((texts := bank(engine)).scored(1, 0, SAMPLES))
    assert engine.asked == len(first) == 3
    for record in first:
        places = np.flatnonzero(record.sampled)
        assert record.rollout_logprobs.tolist() == (-places).tolist()
        assert record.routes is not None
        record.routes.check_tokens(record.tokens, record.origin)
    assert asyncio.run(texts.scored(2, 0, SAMPLES)) == ()
    (resumed := bank(engine)).restore(texts.state())
    again = asyncio.run(resumed.scored(4, 0, [make_record(sample_id=99)]))
    assert [record.tokens.tolist() for record in again] == [record.tokens.tolist() for record in first]


def test_other_weights_than_those_of_the_step_are_not_measured() -> None:
    engine = ScoringEngine()
    assert asyncio.run(bank(engine).scored(4, 3, SAMPLES)) == ()
    assert asyncio.run(bank(engine, 0).scored(4, 0, SAMPLES)) == ()
    assert engine.asked == 0


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_share_the_texts_and_get_their_own_layers(size: int) -> None:
    config = Config.model_validate(CONFIG.model_dump() | {"probe": {"every": 4, "bank": 3}})

    async def plan() -> list[TrainBatch]:
        controller = controller_with(ScoringEngine(), config)
        await controller.load_weights(WeightPush(0, "", ()))
        shares = await controller.plan(1, data_size=size)
        assert len(controller.state()["bank"]) == 3
        return shares

    shares = asyncio.run(plan())
    assert sorted(record.sample_id for share in shares for record in share.bank) == [0, 1, 2]
    for record in rank_share(shares[0], LAYERS[:1]).bank:
        assert record.routes is not None
        assert record.routes.layer_ids == LAYERS[:1]
