"""The bank: fixed texts that the engine prefills at probe steps, so that only the weights change from one to the next.

The texts are rows that the run's first such step sampled, one of each prompt as far as there are as many prompts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from moe_trm.config.schema import ProbeConfig
from moe_trm.errors import EngineError, RecordRejected
from moe_trm.rollout.engine import RolloutEngine
from moe_trm.types import RolloutRecord
from routing import RouteRecord, token_digest

STREAM = 0xBA2C
"""Second word of the seed of the draw."""
ARRAYS = ("tokens", "sampled", "turn_ids")

log = logging.getLogger(__name__)


@runtime_checkable
class PrefillEngine(Protocol):
    """A rollout engine that scores given tokens; those with `EngineTraits.scores_tokens` and `records_routes` do."""

    async def prefilled(self, token_ids: Sequence[int], version: int) -> tuple[np.ndarray, RouteRecord]:
        """`[T - 1]` log-probs of the tokens after the first at temperature 1, nats, and their routes, by prefill.

        Raises `EngineError` where nothing with the weights of `version` answers.
        """


class TextBank:
    """The texts, and what the engine makes of them at its present weights.

    There are none with `probe.bank=0`, and on an engine that scores no given tokens.
    """

    def __init__(self, probe: ProbeConfig, engine: RolloutEngine, seed: int) -> None:
        self._probe, self._seed = probe, seed
        self._engine = engine if isinstance(engine, PrefillEngine) else None
        self._texts: list[RolloutRecord] = []
        self._seconds: float | None = None

    async def scored(self, step: int, version: int, samples: Sequence[RolloutRecord]) -> tuple[RolloutRecord, ...]:
        """The texts with the engine's log-probs at temperature 1 and its routes, both by prefill.

        Empty on other steps (`ProbeConfig.uses_bank`), and where no server answers with the weights of `version`.
        `samples`: of this step; the first call draws the texts from them.
        """
        self._seconds = None
        engine = self._engine
        if engine is None or not self._probe.uses_bank(step):
            return ()
        started = time.perf_counter()
        if not self._texts:
            self._texts = drawn(samples, self._probe.bank, self._seed)
        try:
            return tuple(await asyncio.gather(*(_prefilled(engine, text, version) for text in self._texts)))
        except (EngineError, RecordRejected) as error:
            log.warning("the bank is not measured in step %d: %s", step, error)
            return ()
        finally:
            self._seconds = time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """`time/bank_prefill_s`: seconds that the engine took in this step; empty where it was not asked."""
        return {} if self._seconds is None else {"time/bank_prefill_s": self._seconds}

    def state(self) -> list[dict[str, Any]]:
        """The texts as plain data."""
        return [
            {"sample_id": text.sample_id, "group_id": text.group_id}
            | {name: getattr(text, name).tolist() for name in ARRAYS}
            for text in self._texts
        ]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the texts of `state`."""
        self._texts = [
            bare(
                int(text["sample_id"]),
                int(text["group_id"]),
                np.array(text["tokens"], np.int32),
                np.array(text["sampled"], bool),
                np.array(text["turn_ids"], np.int16),
            )
            for text in state
        ]


async def _prefilled(engine: PrefillEngine, text: RolloutRecord, version: int) -> RolloutRecord:
    logprobs, routes = await engine.prefilled(text.tokens.tolist(), version)
    values = logprobs[text.sampled[1:]].astype(np.float32)
    versions = np.full(len(values), version, np.int32)
    record = replace(text, rollout_logprobs=values, full_logprobs=values, versions=versions)
    return replace(record, routes=replace(routes, token_digest=token_digest(record.tokens, record.origin)))


def drawn(samples: Sequence[RolloutRecord], number: int, seed: int) -> list[RolloutRecord]:
    """At most `number` of the rows, of as many prompts as possible; the same for the same rows and seed."""
    rows = [row for sample in samples for row in sample.rows if row.num_sampled and row.num_tokens > 1]
    order = np.random.default_rng((seed, STREAM)).permutation(len(rows))
    turns: dict[int, int] = {}
    ranked: list[tuple[int, int, int]] = []
    for place in order.tolist():
        group = rows[place].group_id
        turns[group] = turns.get(group, 0) + 1
        ranked.append((turns[group], len(ranked), place))
    return [
        bare(number_of, row.group_id, row.tokens, row.sampled, row.turn_ids)
        for number_of, row in enumerate(rows[place] for _, _, place in sorted(ranked)[:number])
    ]


def bare(sample_id: int, group_id: int, tokens: np.ndarray, sampled: np.ndarray, turn_ids: np.ndarray) -> RolloutRecord:
    """A text without anything that an engine says of it."""
    unknown = np.full(int(sampled.sum()), np.nan, np.float32)
    versions = np.full(len(unknown), -1, np.int32)
    return RolloutRecord(
        sample_id, group_id, f"bank {sample_id}", tokens, sampled, turn_ids, unknown, unknown, versions,
        routes=None, sampling_mask=None, finish_reason="stop",
    )  # fmt: skip
