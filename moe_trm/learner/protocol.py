"""The learner's interface to the loop. Implementations: `learner.megatron`, `learner.deepspeed`.

Shape letters: B rows of a micro-batch, R forwarded tokens of its longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Module

from moe_trm.learner.checkpoint.resumable import Resumable
from moe_trm.sync.manifest import TensorEntry
from moe_trm.sync.rounding import Rounding
from moe_trm.types import TokenBatch
from routing.record.router_shift import RouterScores
from routing.record.sources import Recorded, ReplayReport, RouteSource
from routing.replay.router_losses import RouterTerms


@dataclass(frozen=True)
class Scores:
    """Scores of one micro-batch from a forward pass; all `[B, R]` float32 and 0 where the batch's `mask` is False.

    Attributes:
        logprobs: of the target, over the kept support when the batch carries a sampling mask, else over the vocabulary.
        log_kept_mass: log of the learner's probability of the kept support, or None when not asked for or no mask.
        log_kept_least: the same of its least likely ids alone (`moe_trm.sampling_mask.logprobs.TIED`).
        exact_kl: KL of the rollout's distribution from the learner's over the kept support, never with gradient; None
            when the batch does not carry the rollout's log-probs of it.
        entropy: of the policy over the whole vocabulary at the sampling temperature, nats, with gradient in updates;
            None when not asked for.
        recorded: the routes this pass used, when the source was `Record()`; None otherwise.
        router: the routers' scores of the experts in use, where the source asked to keep them; None otherwise.
        router_shift: `[B, R]` how far these scores are from those in the source (`routing.record.router_shift`),
            without gradient; None where the source has none.
    """

    logprobs: Tensor
    log_kept_mass: Tensor | None = None
    log_kept_least: Tensor | None = None
    exact_kl: Tensor | None = None
    entropy: Tensor | None = None
    recorded: Recorded | None = None
    router: RouterScores | None = None
    router_shift: Tensor | None = None


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step.

    It has the gradient norm before clipping, the learning rate used, whether the step was applied, the loss scale where
    the dtype needs one, the cosine to the gradient before, where it is measured, the mean size of the noise on the
    layers' inputs, where there is any, and the losses of the routers, times their factors. Gradients that are not
    finite are refused.
    """

    grad_norm: float
    lr: float
    applied: bool
    loss_scale: int | None = None
    cosine: float | None = None
    layer_noise: float | None = None
    router_losses: RouterTerms | None = None

    @property
    def is_empty(self) -> bool:
        """True where nothing trained: every gradient is zero, and no step was made, no decay, and none of the schedule.

        So it is where all tokens of a minibatch are rejected, or have no advantage.
        """
        return self.grad_norm == 0 and not self.applied


class Learner(Resumable, Protocol):
    """A policy that trains.

    All calls are collective over the learner's ranks; every rank passes the same number of micro-batches.
    """

    data_rank: int
    data_size: int
    """This rank's index and the number of ranks that hold different rows."""
    moe_layer_ids: tuple[int, ...]
    """0-based decoder layers of the MoE layers this rank owns."""
    model_moe_layer_ids: tuple[int, ...]
    """The same of the whole model, on whatever ranks they are."""
    device: torch.device
    """The scored positions, and the values to compare scores with."""
    is_data_leader: bool
    """True on the first of the ranks that hold the same rows (shards, slices and stages of one model)."""
    repeats_passes: bool
    """True where passes over the same rows, with the same weights and routes, give the same bits (`adds_in_order`)."""

    def score(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        *,
        kept_mass: bool = False,
        weights: str | None = None,
        temperature: float | None = None,
    ) -> list[Scores]:
        """Forward without gradient, at the rollout's temperature or at `temperature`.

        `sources[i]` says whose routes batch `i` uses. `kept_mass` also computes the log kept mass. `weights` names a
        snapshot to score under; the weights in training are back afterwards, bit for bit. Raises `LearnerError` for a
        name that is not held.
        """

    def snapshot(self, name: str, *, saved: bool = False, rounding: Rounding | None = None) -> int:
        """Keep the present weights in host memory under `name`, in place of an older copy. Returns the bytes on this
        rank.

        `saved`: the copy belongs to `state`, and `restore` brings it back. `rounding`: the copy holds the weights as
        the engine has them after such a push.
        """

    def average(self, name: str, share: float) -> int:
        """Move the snapshot `name` by `share` of its distance towards the present weights.

        One that is not held begins as they are. It belongs to `state`, with enough bits to go on with the same values
        (`Snapshots.blend`). Returns the bytes on this rank.
        """

    def forget(self, name: str) -> None:
        """Free the snapshot `name`. Raises `LearnerError` when there is none."""

    def update(
        self,
        batches: Sequence[TokenBatch],
        sources: Sequence[RouteSource],
        objective: Callable[[int, Scores], Tensor],
        *,
        entropy: bool = False,
        kept_mass: bool = False,
        lr_scale: float = 1.0,
        router_terms: RouterTerms | None = None,
    ) -> UpdateResult:
        """Make one optimizer step, at `lr_scale` times the scheduled learning rate.

        None is made where every gradient is zero (`UpdateResult.is_empty`). With `entropy`, scores have the policy's
        entropy, with `kept_mass` the log kept masses. With `router_terms`, the routers' own losses
        (`routing.replay.router_losses`) over the forwarded tokens are part of the loss. Gradients of an earlier update
        that was refused half way are forgotten.

        `objective(i, current)` is called once for each batch on every rank. Ranks of one model that hold the same rows
        call it with the same scores; of pipeline stages only the last one's call makes the gradient. It returns the
        scalar loss contribution of batch `i` from its scores at the current weights (`current.logprobs` has the
        gradient). The contribution is already divided by global denominators. The gradient applied is that of the plain
        sum over all batches of all data-parallel ranks. The replay proof is checked before the step is applied.
        """

    def replay_report(self) -> ReplayReport:
        """Counters of every replayed forward since the last call, summed over ranks.

        Raises `ReplayProofError` when the proof fails.
        """

    def reduce(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Sum each scalar over the ranks that hold different rows.

        Names that end in `:max` or `:min` are compared instead.

        Every rank passes the same names. One collective is made for each of the three kinds that occurs.
        """

    def gather(self, values: Tensor) -> Tensor:
        """The 1-D `values` of all ranks that hold different rows, concatenated in the order of `data_rank`.

        Lengths may differ.
        """

    def sum_over_slices(self, values: Tensor) -> Tensor:
        """Sum of `values` over the ranks with other columns of the same rows and the same layers.

        It is `values` where rows are whole.
        """

    def sum_over_stages(self, values: Tensor) -> Tensor:
        """Sum of `values` over the ranks that hold other layers; `values` where each rank holds all of them."""

    def check_replicas(self) -> None:
        """Compare the bits of every tensor that several ranks hold alike. Raises `ReplicaError` on all ranks.

        A learner whose ranks share no tensor has nothing to compare.
        """

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """The modules of this rank's model, by the names of its implementation with global layer numbers, as they are
        called in a pass.

        None of a learner that is not made of torch's modules.
        """
        return iter(())

    def export_shard(self, directory: str, rounding: Rounding) -> tuple[TensorEntry, ...]:
        """Write the Hugging Face tensors that this rank owns to safetensors files in `directory`, rounded.

        Experts are on their owners, shared tensors on one rank.
        """

    def owned_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors this rank owns, always in the same order, on its device and in its dtype."""
