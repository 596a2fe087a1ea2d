"""A rollout engine that returns the samples of a bundle (`moe_trm.recording`) instead of sampling."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moe_trm.config.engines import ENGINES
from moe_trm.errors import BundleError, RecordRejected
from moe_trm.recording.bundle import BundleReader, joined
from moe_trm.rollout.sampler import rewarded
from moe_trm.rollout.single_turn import SingleTurn
from moe_trm.sync.manifest import Share, WeightPush
from moe_trm.tasks.rewards import score
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams, ServerState

KEPT_STEPS = 8
"""Steps held in memory: where sampling runs ahead of training, samples of several steps are asked for in turn."""


class BundleEngine:
    """`RolloutEngine` that returns a bundle's responses by sample id, so that all after sampling repeats bit for bit.

    Args:
        prompts_grow: a rollout function may have appended to a prompt before anything was sampled.
        prompts_own: an agent wrote the context itself.
        several_rows: a sample may be several rows (`agent.rows`).
        waits: a sample requested before the weights that sampled it exist is returned once they are pushed.
        push_every: steps between two pushes of this run.
        delay_s: seconds until each answer, to try a pipeline without an engine.
    """

    traits = ENGINES["bundle"]

    def __init__(
        self,
        folder: str,
        *,
        prompts_grow: bool = False,
        prompts_own: bool = False,
        several_rows: bool = False,
        waits: bool = False,
        push_every: int = 1,
        delay_s: float = 0.0,
    ) -> None:
        self._waits, self._push_every = waits, push_every
        self._delay_s, self._pushed = delay_s, asyncio.Event()
        self._prompts_grow, self._prompts_own, self._several_rows = prompts_grow, prompts_own, several_rows
        self._reader = BundleReader(folder)
        self._folder = folder
        self._step_of: dict[int, int] = {}
        self._rejected: dict[int, str] = {}
        self._last_group = -1
        self._loaded: dict[int, dict[int, RolloutRecord]] = {}
        self._version = -1

    async def start(self) -> None:
        """Read the headers. Raises `BundleError`."""
        steps = self._reader.steps()
        if not steps:
            raise BundleError(
                "nothing is recorded here",
                where=self._folder,
                expected="files named step-NNNNNN.safetensors",
                fix="Record a run with record.bundle=FOLDER, then set rollout.bundle to that folder.",
            )
        for step in steps:
            header = self._reader.header(step)
            self._step_of |= dict.fromkeys(header.sample_ids, step)
            self._rejected |= header.rejected
            self._last_group = max([self._last_group, *header.group_ids])

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        """The recorded record.

        Raises `BundleError` where the run differs, `RecordRejected` where the recorded run rejected it.

        The reason is the recorded one, or `not_recorded` where the writer was not told.
        """
        step = self._step_of.get(sample_id)
        if step is None:
            if group_id > self._last_group and sample_id not in self._rejected:
                raise BundleError(
                    "the recording ends before this sample",
                    where=self._folder,
                    got=f"group {group_id}",
                    expected=f"at most {self._last_group}",
                )
            reason = self._rejected.get(sample_id, "not_recorded")
            raise RecordRejected(reason, "the recorded run rejected this sample", where=f"sample {sample_id}")
        record = self._records(step)[sample_id]
        self._check_comes(record, step)
        while self._waits and _newest(record) > self._version:
            self._pushed.clear()
            await self._pushed.wait()
        self._check_same_run(record, prompt, group_id)
        await asyncio.sleep(self._delay_s)
        return record

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        """A recording answers with whole samples only."""
        raise BundleError("a recorded run samples nothing", where=self._folder, expected="a call of `generate`")

    async def load_weights(self, push: WeightPush) -> None:
        """Only the version number advances."""
        self._version = push.version
        self._pushed.set()

    def expect(self, version: int) -> None:
        """A recording has the samples of every version."""

    async def receive_weights(self, version: int, shares: Sequence[Share]) -> None:
        """A recording receives nothing: its senders would get no answer."""
        raise BundleError("a recorded run cannot receive a broadcast", got="sync.method=distributed", expected="disk")

    async def release_memory(self) -> None:
        """It has none."""

    def metrics(self) -> dict[str, float]:
        """Nothing happens to it."""
        return {}

    def servers(self) -> tuple[ServerState, ...]:
        """It has none."""
        return ()

    async def close(self) -> None:
        """Nothing is held open."""

    def _records(self, step: int) -> dict[int, RolloutRecord]:
        if step not in self._loaded:
            self._loaded[step] = joined(self._reader.read(step))
            if len(self._loaded) > KEPT_STEPS:
                del self._loaded[min(self._loaded)]
        return self._loaded[step]

    def _check_comes(self, record: RolloutRecord, step: int) -> None:
        """Refuse to wait for weights that are pushed only after the step that needs them."""
        version = _newest(record)
        pushed = -(-version // self._push_every) * self._push_every
        if self._waits and version > self._version and pushed > step - 1:
            raise BundleError(
                "the recording was made with other pushes",
                where=f"{self._folder}, sample {record.sample_id}",
                got=f"sampled with weight version {version} for step {step}, which a push every "
                f"{self._push_every} steps brings after step {pushed}",
                expected=f"a version that is pushed before step {step}",
                fix="Set pipeline.push_every to that of the recorded run (its config.json).",
            )

    def _check_same_run(self, record: RolloutRecord, prompt: Prompt, group_id: int) -> None:
        context = tuple(record.tokens[: int(record.sampled.argmax())].tolist())
        recorded_prompt = context[: len(prompt.token_ids)] if self._prompts_grow else context
        same = record.prompt_id == prompt.prompt_id if self._prompts_own else recorded_prompt == tuple(prompt.token_ids)
        same = same and record.pictures == prompt.pictures
        if not same or record.group_id != group_id:
            raise BundleError(
                "the recording was made with other prompts",
                where=f"{self._folder}, sample {record.sample_id}",
                got=f"prompt {prompt.prompt_id!r} of group {group_id}",
                expected=f"prompt {record.prompt_id!r} of group {record.group_id} with the same token ids",
                fix="Use the seed, task and batch sizes of the recorded run (its config.json).",
            )
        if record.further and not self._several_rows:
            raise BundleError(
                "the recording has several rows of one sample",
                where=f"{self._folder}, sample {record.sample_id}",
                got=f"{len(record.rows)} rows",
                expected="one row of each sample, as agent.rows=last makes them",
                fix="Set agent.rows as in the recorded run (its config.json).",
            )
        if _newest(record) > self._version:
            raise BundleError(
                "the recording is ahead of this run",
                where=f"{self._folder}, sample {record.sample_id}",
                got=f"sampled with weight version {_newest(record)}",
                expected=f"at most {self._version}",
            )


def _newest(record: RolloutRecord) -> int:
    """The newest version that sampled anything of a sample."""
    return max(int(row.versions.max()) for row in record.rows)


class RecordedSampler(SingleTurn):
    """`Sampler` of a recorded run with a rollout function or an agent: whole samples with their rewards.

    The function is not run.
    """

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        """See `Sampler.sample`."""
        record = await self._engine.generate(prompt, self._params, sample_id=sample_id, group_id=group_id)
        return (
            record if record.reward is not None else rewarded(record, await score(self._task, prompt, record), prompt)
        )
