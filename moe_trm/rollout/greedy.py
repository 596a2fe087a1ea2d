"""The greedy answer to each training prompt, beside its samples: the baseline of ReMax."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from moe_trm.errors import BundleError, RecordRejected
from moe_trm.rollout.evaluation import reward_of
from moe_trm.rollout.sampler import Sampler
from moe_trm.types import Prompt, RolloutRecord, SamplingParams


def greedy_params(params: SamplingParams) -> SamplingParams:
    """The parameters of the most likely answer, of the same length and with the same stop tokens."""
    return replace(params, temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)


@dataclass
class _Request:
    """The greedy answer of one group, and how many of its samples have not taken it yet."""

    answer: asyncio.Task[RolloutRecord]
    waiting: int


class GreedyBaseline:
    """`Sampler` whose samples carry the reward of one greedy answer to their prompt, in `RolloutRecord.baseline`.

    The engine is asked for it once for each group of `group_size`, beside its first sample and so under the same
    weights. It is counted (`metrics`) and never trained. Where it is rejected, so are the group's samples
    (`no_greedy_answer`). Source: ReMax (arXiv 2310.10505).
    """

    def __init__(self, sampler: Sampler, params: SamplingParams, group_size: int) -> None:
        self._sampler, self._params, self._group_size = sampler, greedy_params(params), group_size
        self._requests: dict[int, _Request] = {}
        self._running: set[asyncio.Task[RolloutRecord]] = set()
        self._answers, self._rejected, self._tokens = 0, 0, 0

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        """See `Sampler.sample`. Raises `RecordRejected` (`no_greedy_answer`) where the prompt has no baseline."""
        answer = self._answer_of(prompt, group_id)
        # Both are waited for, even if one fails: an unread failure would be reported later.
        record, greedy = await asyncio.gather(
            self._sampler.sample(prompt, sample_id=sample_id, group_id=group_id),
            asyncio.shield(answer),
            return_exceptions=True,
        )
        if isinstance(record, BaseException):
            raise record
        if isinstance(greedy, RecordRejected):
            raise RecordRejected(
                "no_greedy_answer",
                f"the greedy answer to its prompt was rejected as {greedy.reason}: {greedy.what}",
                where=f"sample {sample_id}",
                got=greedy.got,
                expected=greedy.expected,
            ) from greedy
        if isinstance(greedy, BaseException):
            raise greedy
        return replace(record, baseline=reward_of(greedy))

    async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
        """See `Sampler.answer`."""
        return await self._sampler.answer(prompt, params)

    def metrics(self) -> dict[str, float]:
        """`greedy/answers`, `greedy/rejected` and `greedy/tokens`, beside the metrics of the sampler itself."""
        return {
            **self._sampler.metrics(),
            "greedy/answers": float(self._answers),
            "greedy/rejected": float(self._rejected),
            "greedy/tokens": float(self._tokens),
        }

    async def close(self) -> None:
        """Give up what is being answered, and release the sampler."""
        pending = [*self._running]
        for answer in pending:
            answer.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._sampler.close()

    def _answer_of(self, prompt: Prompt, group_id: int) -> asyncio.Task[RolloutRecord]:
        request = self._requests.get(group_id)
        if request is None:
            request = _Request(asyncio.ensure_future(self._greedy(prompt)), self._group_size)
            self._running.add(request.answer)
            request.answer.add_done_callback(self._running.discard)
            self._requests[group_id] = request
        request.waiting -= 1
        if not request.waiting:
            del self._requests[group_id]
        return request.answer

    async def _greedy(self, prompt: Prompt) -> RolloutRecord:
        self._answers += 1
        try:
            record = await self._sampler.answer(prompt, self._params)
        except RecordRejected:
            self._rejected += 1
            raise
        self._tokens += record.num_sampled
        return record


class RecordedBaseline:
    """`Sampler` of a recorded run whose samples carry the rewards of its greedy answers already.

    Args:
        sampler: gives the recorded samples.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        """See `Sampler.sample`. Raises `BundleError` where the recorded run asked for no greedy answers."""
        record = await self._sampler.sample(prompt, sample_id=sample_id, group_id=group_id)
        if record.baseline is None:
            raise BundleError(
                "the recording has no rewards of greedy answers",
                where=f"sample {sample_id}",
                got="advantage.name=remax with rollout.engine=bundle",
                expected="a bundle of a run with advantage.name=remax",
                fix="Record a run with advantage.name=remax, or choose another advantage.name.",
            )
        return record

    async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
        """See `Sampler.answer`."""
        return await self._sampler.answer(prompt, params)

    def metrics(self) -> dict[str, float]:
        """See `Sampler.metrics`."""
        return self._sampler.metrics()

    async def close(self) -> None:
        """Release the sampler."""
        await self._sampler.close()
