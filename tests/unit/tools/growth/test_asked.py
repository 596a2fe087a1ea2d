"""What an engine is asked of a text: a prefill of all its tokens, and the routes of those that are forwarded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from moe_trm.sync.manifest import WeightPush
from moe_trm.tools.growth.cells import ask
from moe_trm.types import SampledTurn, SamplingParams
from routing import RouteRecord, token_digest
from tests.unit.doubles import StandInEngine
from tests.unit.records import make_record

LAYERS, EXPERTS, TOP_K = 3, 8, 2


class Engine(StandInEngine):
    """Takes a push, and routes each token by its id."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def load_weights(self, push: WeightPush) -> None:
        self.calls.append("push")

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        assert params.max_new_tokens == 1
        self.calls.append("turn")
        return SampledTurn(
            tokens=np.array([5], np.int32),
            rollout_logprobs=np.zeros(1, np.float32),
            full_logprobs=np.zeros(1, np.float32),
            versions=np.ones(1, np.int32),
            routes=routed(context, 5),
            sampling_mask=None,
            finish_reason="length",
        )

    async def close(self) -> None:
        self.calls.append("close")


def routed(context: Sequence[int], sampled: int) -> RouteRecord:
    ids = np.asarray(context)[:, None, None] % (EXPERTS - 1) + np.arange(TOP_K)
    experts = np.broadcast_to(ids, (len(context), LAYERS, TOP_K)).astype(np.uint8)
    return RouteRecord(experts, (0, 1, 2), EXPERTS, token_digest(np.array([*context, sampled], np.int32)))


def test_the_routes_are_bound_to_the_text_and_log_probs_are_those_of_its_sampled_tokens() -> None:
    engine, record = Engine(), make_record()

    async def prefill(ids: Sequence[int]) -> np.ndarray:
        assert [*ids] == record.tokens.tolist()
        return np.arange(1.0, len(ids))

    (text,) = asyncio.run(ask(engine, prefill, None, [record]))  # type: ignore[arg-type]
    assert engine.calls == ["push", "turn", "close"]
    assert text.logprobs.tolist() == np.flatnonzero(record.sampled).tolist()
    text.routes.check_tokens(record.tokens, record.origin)
    text.routes.validate(record.num_tokens)
