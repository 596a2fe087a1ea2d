"""A user's reward function, or math-verify, in separate processes (`moe_trm.runtime.functions`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moe_trm.errors import RecordRejected
from moe_trm.runtime.functions.host import FunctionHost
from moe_trm.runtime.functions.process import FunctionFailed
from moe_trm.tasks.reward_input import RewardInput
from moe_trm.tasks.rewards import read_reward

ADAPTER = "moe_trm.tasks.reward_adapter:adapt"
MAX_BATCH = 64
"""Samples given to a batched function at once."""
MAX_OPEN_BATCHES, MAX_OPEN_SAMPLES = 8, 256
"""Calls of an async function that are awaited together: of one that takes lists, of one that takes samples."""

_Waiting = tuple[RewardInput, "asyncio.Future[Any]"]


class FunctionReward:
    """Scores samples with a function, however it wants to be called (`reward_adapter`).

    `processes`: of a function that is not async. `key`: where its name stands in the configuration.
    """

    def __init__(self, function: str, *, timeout_s: float, processes: int = 1, key: str = "task.reward") -> None:
        self._hosts = [FunctionHost(function, adapter=ADAPTER, key=key, limit_s=timeout_s) for _ in range(processes)]
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._lanes: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the function. Raises `ConfigError`."""
        ready = await self._hosts[0].start()
        if not ready.concurrent:
            lanes = self._hosts
        else:
            lanes = self._hosts[:1] * (MAX_OPEN_BATCHES if ready.batched else MAX_OPEN_SAMPLES)
        most = MAX_BATCH if ready.batched else 1
        self._lanes = [asyncio.create_task(self._lane(host, most)) for host in lanes]

    async def __call__(self, sample: RewardInput) -> Any:
        """Value of the function for `sample`.

        Raises `RecordRejected` (`reward_error`, `reward_timeout`, `reward_crash`, `reward_type`, `reward_shape`).
        """
        if not self._lanes:
            await self.start()
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((sample, result))
        value = await result
        # Here, where the function's file and line are known; the weights of its parts do not matter.
        read_reward(value, {}, f"prompt {sample.prompt_id}", place=self._hosts[0].place)
        return value

    async def close(self) -> None:
        """End the processes."""
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        for host in self._hosts:
            await host.close()

    async def _lane(self, host: FunctionHost, most: int) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < most and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            await self._score(host, batch)

    async def _score(self, host: FunctionHost, batch: Sequence[_Waiting]) -> None:
        """Settle every sample of `batch`.

        A batch that fails is asked again one by one, so that only what is to blame is rejected.
        """
        try:
            values = await self._values(host, [sample for sample, _ in batch])
        except RecordRejected as rejection:
            if len(batch) > 1:
                for waiting in batch:
                    await self._score(host, [waiting])
            else:
                _settle(batch[0][1], rejection)
        except Exception as error:  # noqa: BLE001 (the reward's caller must be told)
            for _, result in batch:
                _settle(result, error)
        else:
            for (_, result), value in zip(batch, values, strict=True):
                if not result.done():
                    result.set_result(value)

    async def _values(self, host: FunctionHost, samples: Sequence[RewardInput]) -> list[Any]:
        where = samples[0].prompt_id
        try:
            values = await host.call([asdict(sample) for sample in samples])
        except FunctionFailed as failure:
            raise RecordRejected(
                f"reward_{failure.reason}",
                "the reward function failed",
                where=f"prompt {where}",
                got=failure.what,
                expected="a number in time",
                fix="make the reward function total; task.reward_timeout_s bounds one call",
            ) from failure
        if not isinstance(values, list) or len(values) != len(samples):
            raise RecordRejected(
                "reward_shape",
                "the reward function did not return one value for each sample",
                where=f"prompt {where}",
                got=f"{len(values)} values" if isinstance(values, list) else type(values).__name__,
                expected=f"a list of {len(samples)}",
            )
        return values


def _settle(result: asyncio.Future[Any], error: Exception) -> None:
    if not result.done():
        result.set_exception(error)
