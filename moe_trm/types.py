"""The contract between rollout, store, learner and correction, on one page.

Shape letters: T tokens of one sequence, S tokens the policy sampled in it, B rows of a micro-batch, R forwarded rows, L
MoE layers, K experts per token. R is `T - 1`; in a padded micro-batch that of the longest sequence.

Row convention, everywhere: row `r` has input token `r`, the routes of that token, and the log-prob of token `r + 1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from moe_trm.sampling_mask.record import SamplingMask
from routing import RouteRecord, sample_origin, token_digest
from routing.layout.row_ids import row_id
from routing.record.sources import ReplayRecords


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of the behaviour policy.

    `top_k` is always finite: the engine needs that to return its sampling mask. A text of `stop_texts` ends an answer
    as soon as the text of the sampled ids has it; the ids stay as they were sampled. `seed` draws this one answer,
    where the server samples deterministically; None: the server draws by itself.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 1
    min_p: float = 0.0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class ServerState:
    """A rollout server at this moment.

    Attributes:
        url: its address.
        lost_s: seconds that it has been out of service; None while it is in service.
        why: what took it out of service; empty while it is in service.
        awaited_s: seconds that a run has waited for its first answer; None once it has answered.
        limit_s: longest such wait.
    """

    url: str
    lost_s: float | None = None
    why: str = ""
    awaited_s: float | None = None
    limit_s: float = 0.0


@dataclass(frozen=True)
class Prompt:
    """One task instance.

    `answer` and `extra` are what the reward needs; token ids are final, nothing re-tokenises them. `messages` is the
    prompt as chat messages, where it is that; an agent is given them and writes its own context. `pictures`: PNGs, in
    the order of their runs of image tokens.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    answer: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()
    pictures: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class SessionTurn:
    """One answer in the tree of an agent's session.

    Attributes:
        parent: number of the answer that it continues; -1: none, it begins a branch at the root.
        added: tokens before it that its parent does not have: messages, tools' results, the template.
        sampled: tokens of the answer.
        row: row of its sample that trains it; -1: none does.
        cut: its messages continue an answer that its ids do not, e.g. because the chat template changed earlier text.
        reason: why no row trains it: `not_chosen` by `agent.rows`, or what its rows were rejected for; empty otherwise.
        cut_by: reason of the cut; empty where there is none, and in recordings that do not have it.
        dialect: interface over which it was asked for; empty in recordings that do not have it.
    """

    parent: int
    added: int
    sampled: int
    row: int = -1
    cut: bool = False
    reason: str = ""
    cut_by: str = ""
    dialect: str = ""


@dataclass(frozen=True)
class RolloutRecord:
    """Record of one sequence from the rollout engine.

    Attributes:
        sample_id: unique within a run; `group_id` is shared by the samples of one prompt.
        row: its place among the rows of its sample. Most samples are one row; an agent's session may be several
            (`agent.rows`), whose sampled tokens are disjoint.
        tokens: `[T]` int32, prompt and everything after it.
        sampled: `[T]` bool, True on the `S` tokens the policy sampled (never on prompt or tool tokens, nor on
            answers that are the context of this row).
        turn_ids: `[T]` int16, 0 on the prompt and the first answer, rising by one with each later turn.
        rollout_logprobs: `[S]` float32, log-prob of each sampled token under the distribution it was drawn from: over
            the kept support when a sampling mask was recorded, over the whole vocabulary otherwise.
        full_logprobs: `[S]` float32, the same over the whole vocabulary at the sampling temperature. The difference is
            the log kept mass. NaN where the engine does not tell it.
        versions: `[S]` int32, the weight version that sampled each token.
        routes: expert ids of the `T - 1` forwarded tokens, or None when routes were not asked for.
        sampling_mask: kept ids of each of the `S` sampled tokens, or None when masks were not asked for.
        finish_reason: `stop`, `length` or `abort`.
        reward: set by the task; None until then.
        reward_parts: terms of the reward's weighted sum, by name; empty when the reward is one number.
        further: the other rows of the sample, in the order of `row`, on their way to the learner; on the first row
            only. Reward and `finish_reason` are those of the sample, and the same in all rows.
        session: the tree of the agent's session that it is a row of, its answers in the order in which they came; empty
            where the sample is no session.
        baseline: reward of the greedy answer to the same prompt; None where none was asked for.
        teacher_logprobs: `[S]` float32, log-prob of each sampled token under `kl.teacher`; None without a teacher.
        server: place among the run's servers of the one that sampled all of it; None: several did, the run has one
            alone, or a router chose.
        expected: the answer that the reward compares with, for transcripts; empty where the task has none.
        pictures: as in `Prompt`.
    """

    sample_id: int
    group_id: int
    prompt_id: str
    tokens: np.ndarray
    sampled: np.ndarray
    turn_ids: np.ndarray
    rollout_logprobs: np.ndarray
    full_logprobs: np.ndarray
    versions: np.ndarray
    routes: RouteRecord | None
    sampling_mask: SamplingMask | None
    finish_reason: str
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    row: int = 0
    further: tuple[RolloutRecord, ...] = ()
    session: tuple[SessionTurn, ...] = ()
    baseline: float | None = None
    teacher_logprobs: np.ndarray | None = None
    server: int | None = None
    expected: str = ""
    pictures: tuple[bytes, ...] = ()

    @property
    def rows(self) -> tuple[RolloutRecord, ...]:
        """All rows of the sample, each by itself."""
        return (replace(self, further=()), *self.further) if self.further else (self,)

    @property
    def row_id(self) -> int:
        """Number of this row, unique within a run (`routing.layout.row_ids`)."""
        return row_id(self.sample_id, self.row)

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_sampled(self) -> int:
        return int(self.rollout_logprobs.shape[0])

    @property
    def scored(self) -> np.ndarray:
        """`[S]` bool: all sampled tokens but those whose mask violation dropped them (`SamplingMask`)."""
        if self.sampling_mask is None:
            return np.ones(self.num_sampled, bool)
        return np.diff(self.sampling_mask.offsets) > 0

    @property
    def num_scored(self) -> int:
        """Number of `scored` tokens."""
        if self.sampling_mask is None:
            return self.num_sampled
        offsets = self.sampling_mask.offsets
        return int(np.count_nonzero(offsets[1:] != offsets[:-1]))

    @property
    def origin(self) -> bytes:
        """The origin that binds its routes besides its tokens: the row, and the version of every sampled token."""
        return sample_origin(self.row_id, self.versions)

    def bound(self) -> RolloutRecord:
        """The same record with its routes bound to it, where they were bound to its tokens alone; so all its rows."""
        routes = self.routes
        if routes is not None and routes.token_digest == token_digest(self.tokens):
            routes = routes.bind(self.tokens, self.origin)
        elif not self.further:
            return self
        return self.changed(routes=routes, further=tuple(row.bound() for row in self.further))

    def changed(self, **fields: object) -> RolloutRecord:
        """As `dataclasses.replace`, which takes ten times as long for as many fields."""
        assert fields.keys() <= self.__dict__.keys(), "fields of a record"
        copied = object.__new__(RolloutRecord)
        copied.__dict__.update(self.__dict__, **fields)
        return copied


@dataclass(frozen=True)
class SampledTurn:
    """Record of one answer of the engine. Arrays as in `RolloutRecord`, of this answer's tokens only.

    Attributes:
        tokens: `[S]` int32 sampled ids, the stop token included.
        routes: of the rows `start..T-2`, where T counts the context and the sampled tokens; its digest is that of all T
            tokens.
        recomputed: number of leading sampled tokens whose routes the engine may have recomputed: all before the last
            version of an answer that was not interrupted, and all but the last of one that was retracted.
        retracted: the engine computed routes again under unchanged weights, for want of memory.
        server: as in `RolloutRecord`.
    """

    tokens: np.ndarray
    rollout_logprobs: np.ndarray
    full_logprobs: np.ndarray
    versions: np.ndarray
    routes: RouteRecord | None
    sampling_mask: SamplingMask | None
    finish_reason: str
    recomputed: int = 0
    retracted: bool = False
    server: int | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TrainRow:
    """One accepted record on its way to a learner rank.

    Attributes:
        sample_tokens: scored tokens of all rows of its sample; None: this row is the whole sample.
        weight: of the row in the loss, where its group was drawn to be trained again.
    """

    record: RolloutRecord
    sample_tokens: int | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class RewardedSample:
    """One sample of a step as advantages compare it: every rank has those of all ranks (`moe_trm.step.advantages`).

    Attributes:
        num_tokens: sampled tokens of all its rows.
        turns: the different turns of its scored tokens, ascending; empty where no estimator compares turns.
        reward, reward_parts, baseline: as in `RolloutRecord`.
    """

    sample_id: int
    group_id: int
    num_tokens: int
    reward: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    baseline: float | None = None
    turns: tuple[int, ...] = ()


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are forwarded together on one rank.

    An empty micro-batch (no rows) keeps ranks in step and trains nothing.
    """

    rows: tuple[TrainRow, ...]


@dataclass(frozen=True)
class MiniBatch:
    """The micro-batches of one optimizer step on one rank, with the denominators of the *global* minibatch.

    Denominators count what survived validity rejection, before any correction. `num_sequences` counts samples, however
    many rows they are.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True)
class TrainBatch:
    """One rank's share of one training step: the minibatches, and what is known of the whole step.

    `versions`: the weight versions that sampled anything in the whole step, ascending. `compared`: the samples of all
    ranks whose rewards are compared with each other, for each part of the step in which they arrived. `bank`: this
    rank's share of the fixed texts of a probe, as the engine scored them (`probe.bank`).
    """

    step: int
    mini_batches: tuple[MiniBatch, ...]
    metrics: Mapping[str, float]
    versions: tuple[int, ...] = ()
    compared: tuple[tuple[RewardedSample, ...], ...] = ()
    bank: tuple[RolloutRecord, ...] = ()


@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch as padded tensors. Padding rows have `valid` False, never count, and carry arbitrary legal values.

    Attributes:
        input_ids: `[B, R]` int64 tokens fed to the model.
        target_ids: `[B, R]` int64 token `r + 1`.
        valid: `[B, R]` bool, a real forwarded token.
        mask: `[B, R]` bool, the target was sampled by the policy: only these are scored and trained.
        rollout_logprobs, full_logprobs: `[B, R]` float32, 0 where `mask` is False.
        versions: `[B, R]` int32, -1 where `mask` is False.
        turn_ids: `[B, R]` int16 turn of the target.
        advantages: `[B, R]` float32, 0 where `mask` is False; NaN where it is True until `moe_trm.step.advantages` has
            given them.
        routes: the route records of the B rows in order, None on padding rows and where none was recorded; cut to
            tensors by `routing.layout.padded`.
        origins: what the routes of each row are bound to besides its tokens (`RolloutRecord.origin`), None on padding
            rows; empty in batches that are made of no records.
        sampled_by: the oldest and the newest weight version that sampled each row, on the host; -1 on padding rows,
            empty in batches that are made of no records.
        servers: `RolloutRecord.server` of each row, on the host; -1 where it is None and on padding rows, empty in
            batches that are made of no records.
        prompts: forwarded tokens of each row up to the one whose target is its first scored token; on the host.
        rewards: `[B]` float32 reward of each row, 0 on padding rows; `group_ids`: `[B]` int64 prompt of each row, -1 on
            padding rows. None in batches that are only scored.
        group_means: `[B]` float32 mean reward of the row's group, 0 on padding rows; None until
            `moe_trm.step.advantages` has given it.
        kept_ids, kept_offsets: sampling mask as CSR over the `mask` positions in row-major order: int64 ids, `[N + 1]`
            offsets; None in `off` mode.
        kept_logprobs: float32 log-probs of the kept ids in the rollout; None in `off` mode and where only ids were
            recorded.
        sample_ids: `RolloutRecord.row_id` of each of the B rows, -1 on padding rows; empty where they are not named.
        sample_tokens: `[B]` int64 scored tokens of all rows of each row's sample, 0 on padding rows; None where every
            row is a whole sample.
        row_weights: `[B]` float32 weight of each row in the loss, 1 on padding rows; None where each counts once.
        reference_logprobs: `[B, R]` float32, 0 where `mask` is False: the teacher's, or the reference's once they are
            scored (`moe_trm.step.reference`); None without.
        pictures: of each of the B rows, as in `Prompt`; empty where no row has any.
    """

    input_ids: torch.Tensor
    target_ids: torch.Tensor
    valid: torch.Tensor
    mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    full_logprobs: torch.Tensor
    versions: torch.Tensor
    turn_ids: torch.Tensor
    advantages: torch.Tensor
    routes: tuple[RouteRecord | None, ...]
    kept_ids: torch.Tensor | None
    kept_offsets: torch.Tensor | None
    rewards: torch.Tensor | None = None
    group_ids: torch.Tensor | None = None
    group_means: torch.Tensor | None = None
    kept_logprobs: torch.Tensor | None = None
    origins: tuple[bytes | None, ...] = ()
    sampled_by: tuple[tuple[int, int], ...] = ()
    servers: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    sample_ids: tuple[int, ...] = ()
    sample_tokens: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    pictures: tuple[tuple[bytes, ...], ...] = ()

    @cached_property
    def rollout_routes(self) -> ReplayRecords:
        """The routes of the rollout, with what each row's have to be bound to; one source for all passes."""
        return ReplayRecords(self.routes, self.origins, prompts=self.prompts)
