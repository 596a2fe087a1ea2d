"""An engine that says what a test wants; its routes, log-probs, masks and versions are functions of the ids before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import SampledTurn, SamplingParams
from routing import RouteRecord, token_digest
from tests.unit.doubles import StandInEngine
from tests.unit.rollout.causal_engine import digest as digest_of_bytes

LAYERS = (0, 2)


def digest(prefix: Sequence[int]) -> bytes:
    return digest_of_bytes(np.array(prefix, "<i4").tobytes())


def route_row(prefix: Sequence[int]) -> np.ndarray:
    """`[L, K]` experts of the last id of `prefix`."""
    data = digest(prefix)
    return np.array([(data[layer] % 8, (data[layer] + 1 + data[layer + 4] % 7) % 8) for layer in LAYERS], np.uint8)


def logprob(prefix: Sequence[int]) -> float:
    return -0.01 - digest(prefix)[5] / 100


def kept(prefix: Sequence[int], token: int) -> list[int]:
    """Ids that `token` was drawn from behind `prefix`, in ascending order."""
    return sorted({token, *digest(prefix)[6:8]})


def mask_of(context: Sequence[int], sampled: Sequence[int]) -> SamplingMask:
    ids = [*context, *sampled]
    rows = [kept(ids[: len(context) + place], token) for place, token in enumerate(sampled)]
    return SamplingMask(np.concatenate(rows).astype(np.int32), np.cumsum([0, *map(len, rows)]))


def turn_of(
    context: Sequence[int],
    sampled: Sequence[int],
    *,
    start: int = 0,
    version: int = 0,
    reason: str = "stop",
    masks: bool = False,
) -> SampledTurn:
    """The record of `sampled` behind `context`, with routes from row `start` on."""
    ids = [*context, *sampled]
    rows = np.array([route_row(ids[: row + 1]) for row in range(start, len(ids) - 1)], np.uint8)
    logprobs = np.array([logprob(ids[: len(context) + place]) for place in range(len(sampled))], np.float32)
    return SampledTurn(
        tokens=np.array(sampled, np.int32),
        rollout_logprobs=logprobs,
        full_logprobs=logprobs,
        versions=np.full(len(sampled), version, np.int32),
        routes=RouteRecord(rows.reshape(-1, len(LAYERS), 2), LAYERS, 8, token_digest(np.array(ids, np.int32))),
        sampling_mask=mask_of(context, sampled) if masks else None,
        finish_reason=reason,
    )


class SpeakingEngine(StandInEngine):
    """`turn` of `RolloutEngine`.

    Args:
        speak: the ids of the answer to a context.
        decode: the text of ids, where stop texts are looked for.
        masks: record what each token was drawn from.
    """

    def __init__(
        self,
        speak: Callable[[Sequence[int]], Sequence[int]],
        decode: Callable[[Sequence[int]], str] | None = None,
        *,
        masks: bool = False,
    ) -> None:
        self._masks = masks
        self.speak, self.decode, self.version = speak, decode, 0
        self.asked: list[SamplingParams] = []
        self.wait = asyncio.Event()
        self.wait.set()

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        self.asked.append(params)
        await self.wait.wait()
        said = list(self.speak(context))
        ends = [place for place, token in enumerate(said) if token in params.stop_token_ids]
        ends += self._ends_of_texts(said, params.stop_texts)
        said = said[: min(ends) + 1] if ends else said
        cut = said[: params.max_new_tokens]
        reason = "stop" if ends and len(cut) == min(ends) + 1 else "length"
        return turn_of(context, cut, start=start, version=self.version, reason=reason, masks=self._masks)

    def _ends_of_texts(self, said: Sequence[int], texts: Sequence[str]) -> list[int]:
        """The first place up to which the text has one of `texts`."""
        if self.decode is None:
            return []
        heads = (self.decode(said[: place + 1]) for place in range(len(said)))
        return [place for place, head in enumerate(heads) if any(text in head for text in texts)][:1]

    async def load_weights(self, push: WeightPush) -> None:
        self.version = push.version
