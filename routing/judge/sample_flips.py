"""Flips of each sample and layer, and of each token: counted on the device in every replayed forward.

They are added over passes and ranks. Rows that another pass of the step judges, because that one has the weights which
sampled them, are left out.

Only counts leave a rank, never routes.

Shape letters: S samples, B samples of a micro-batch, N local tokens in router order, L decoder layers, K experts per
token.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from routing.judge import answer_agreement
from routing.judge.end_agreement import SHAPE, at_ends
from routing.judge.token_agreement import Disagreement, least_lost, of_samples
from routing.layout.row_ids import UNNAMED


@dataclass(frozen=True)
class SampleFlips:
    """Counts over all replayed forwards since the last report.

    Attributes:
        keys: `[S]` int64, the row's id (`routing.layout.row_ids`), or a number above `UNNAMED`.
        due: `[S, L]` int64, tokens that had to use a recorded set.
        flipped: `[S, L]` int64, of these, how many the live router would have given another set.
        lost: `[S, L]` int64, recorded experts that the live router would not have chosen.
        apart: `[L, 2]` int64, tokens that disagree with their routes in a layer, and the experts that these lost.
        ends: recorded and lost experts at both ends of the rows that are fresh (`routing.judge.end_agreement`).
        answers: recorded and lost experts on the prompts and behind them (`routing.judge.answer_agreement`).
        by_token: tokens judged by themselves (`routing.judge.token_agreement`).
        fresh: `[S]` bool, the weights of the forwards were those that sampled the row.
    """

    keys: np.ndarray
    due: np.ndarray
    flipped: np.ndarray
    lost: np.ndarray
    apart: np.ndarray
    ends: np.ndarray
    answers: np.ndarray
    by_token: Disagreement
    fresh: np.ndarray

    @classmethod
    def of(cls, keys: np.ndarray, due_SL: np.ndarray, flipped: np.ndarray, lost: np.ndarray) -> SampleFlips:
        """Counts by sample and layer alone."""
        none, ends = np.zeros((due_SL.shape[1], 2), np.int64), np.zeros(SHAPE, np.int64)
        answers, by_token = np.zeros(answer_agreement.SHAPE, np.int64), Disagreement.nothing(len(keys))
        return cls(keys, due_SL, flipped, lost, none, ends, answers, by_token, np.zeros(len(keys), bool))


class PassFlips:
    """The counts of one forward.

    Args:
        keys: of the B samples.
        due_B: `[B]` tokens of each on this rank that must use recorded sets.
        layers: the forwarded MoE layers.
        num_layers: L.
        sample_last: router order is `[columns, B]`, not `[B, columns]`.
        sample_of: `[N]` int64, the sample of each local token where samples share a row; None: they do not.
        device: of the counts.
        due_N: `[N]` bool, the tokens of `due_B` on the CPU; None: no token is judged by itself.
        experts: K and E.
        at_sampling: of each of the B samples, as in `ReplayRecords`; empty: unknown of all.
        behind_N: `[N]` bool, tokens behind the prompt of their sample, on the CPU; None: unknown.
    """

    def __init__(
        self,
        keys: Sequence[int],
        due_B: Tensor,
        layers: Sequence[int],
        num_layers: int,
        *,
        sample_last: bool,
        device: torch.device,
        sample_of: Tensor | None = None,
        due_N: Tensor | None = None,
        experts: tuple[int, int] = (0, 0),
        at_sampling: Sequence[bool | None] = (),
        behind_N: Tensor | None = None,
    ) -> None:
        self._sample_of = None if sample_of is None else sample_of.to(device)
        self._sample_last, self.keys = sample_last, list(keys)
        self._due, self._slots, self._top_k = due_N, 0, experts[0]
        self._behind = behind_N
        self._chance = 1 - experts[0] / experts[1] if experts[1] else 0.0
        self.judged_B = np.array([at is not False for at in at_sampling or [None] * len(keys)])
        self.fresh_B = np.array([at is True for at in at_sampling or [None] * len(keys)])
        num_tokens = 0 if due_N is None else len(due_N)
        self.lost_N = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.apart_L2 = torch.zeros(num_layers, 2, dtype=torch.int64, device=device)
        self._judged_N = (
            None if due_N is None else (due_N & torch.from_numpy(self.judged_B)[self._samples()]).to(device)
        )
        self.due_BL = np.zeros((len(keys), num_layers), np.int64)
        self.due_BL[:, list(layers)] = due_B.numpy()[:, None]
        self.counts_LKB = torch.zeros(num_layers, 2, len(keys), dtype=torch.int32, device=device)

    def count(self, layer: int, marks_2N: Tensor) -> None:
        """Add what the router of `layer` would have chosen otherwise: flips and lost experts of each local token.

        int32, zeros where nothing is due.
        """
        counts_2B, num_samples = self.counts_LKB[layer], len(self.keys)
        if self._sample_of is not None:
            counts_2B.index_add_(1, self._sample_of, marks_2N)
        elif self._sample_last:
            counts_2B += marks_2N.reshape(2, -1, num_samples).sum(1, dtype=torch.int32)
        else:
            counts_2B += marks_2N.reshape(2, num_samples, -1).sum(2, dtype=torch.int32)
        if self._judged_N is None:
            return
        lost_N = marks_2N[1]
        self._slots += self._top_k
        self.lost_N += lost_N
        if (least := least_lost(self._top_k, self._chance)) <= self._top_k:
            apart_N = (lost_N >= least) & self._judged_N
            self.apart_L2[layer] += torch.stack((apart_N.sum(), (lost_N * apart_N).sum()))

    def by_token(self, lost_N: np.ndarray) -> tuple[Disagreement, np.ndarray, np.ndarray]:
        """The samples, judged token by token, their ends and answers; `lost_N` is that of this pass on the CPU."""
        nothing = np.zeros(answer_agreement.SHAPE, np.int64)
        if self._judged_N is None or self._due is None:
            return Disagreement.nothing(len(self.keys)), np.zeros(SHAPE, np.int64), nothing
        sample_N = self._samples().numpy()
        judged = self._due.numpy() & self.judged_B[sample_N]
        order = np.flatnonzero(judged)
        order = order[np.argsort(sample_N[order], kind="stable")]
        fresh = order[self.fresh_B[sample_N[order]]]
        return (
            of_samples(lost_N[order], sample_N[order], len(self.keys), self._slots, self._chance),
            at_ends(lost_N[fresh], sample_N[fresh], self._slots),
            nothing
            if self._behind is None
            else answer_agreement.by_side(lost_N[fresh], self._behind.numpy()[fresh], self._slots),
        )

    def _samples(self) -> Tensor:
        """`[N]` int64: the sample of each local token."""
        if self._sample_of is not None:
            return self._sample_of.cpu()
        assert self._due is not None
        place = torch.arange(len(self._due))
        return place % len(self.keys) if self._sample_last else place // (len(self._due) // len(self.keys))


def keys_of(samples: Sequence[int] | None, input_ids: Tensor | Sequence[Tensor]) -> list[int]:
    """The samples' ids, or numbers made from the tokens and the place of each row of `input_ids` `[B, R]`.

    Rows may have different lengths.
    """
    if samples:
        return list(samples)
    return [
        UNNAMED + (zlib.crc32(row.int().numpy().tobytes()) << 16) + place
        for place, row in enumerate(input_ids.cpu() if isinstance(input_ids, Tensor) else input_ids)
    ]


def total(passes: Iterable[PassFlips], num_layers: int) -> SampleFlips:
    """The counts of all `passes` of this rank, those of padding and of rows judged elsewhere left out."""
    all_passes = list(passes)
    if not all_passes:
        return SampleFlips.of(np.zeros(0, np.int64), *np.zeros((3, 0, num_layers), np.int64))
    # One transfer from the device for each kind of count, over all passes.
    counts_LKB = torch.cat([pass_flips.counts_LKB for pass_flips in all_passes], dim=2).cpu().numpy()
    lost_N = torch.cat([pass_flips.lost_N for pass_flips in all_passes]).cpu().numpy()
    ends = np.cumsum([len(pass_flips.lost_N) for pass_flips in all_passes])
    by_token, by_end, by_side = zip(
        *(
            pass_flips.by_token(lost_N[end - len(pass_flips.lost_N) : end])
            for pass_flips, end in zip(all_passes, ends, strict=True)
        ),
        strict=True,
    )
    flipped_SL, lost_SL = counts_LKB.transpose(1, 2, 0).astype(np.int64)
    joined = SampleFlips(
        np.array([key for pass_flips in all_passes for key in pass_flips.keys], np.int64),
        np.concatenate([pass_flips.due_BL for pass_flips in all_passes]),
        flipped_SL,
        lost_SL,
        torch.stack([pass_flips.apart_L2 for pass_flips in all_passes]).sum(0).cpu().numpy(),
        np.sum(by_end, axis=0),
        np.sum(by_side, axis=0),
        Disagreement(*(np.concatenate(part) for part in zip(*by_token, strict=True))),
        np.concatenate([pass_flips.fresh_B for pass_flips in all_passes]),
    )
    judged = np.concatenate([pass_flips.judged_B for pass_flips in all_passes])
    return summed(joined, np.flatnonzero(joined.due.any(1) & judged))


def summed(flips: SampleFlips, places_counted: np.ndarray | None = None) -> SampleFlips:
    """Counts of which several may have one key, added by their keys; `places_counted`: places of those that count."""
    places = np.arange(len(flips.keys)) if places_counted is None else places_counted
    order = places[np.argsort(flips.keys[places], kind="stable")]
    if not len(order):
        nothing = np.zeros((3, 0, flips.due.shape[1]), np.int64)
        return SampleFlips.of(flips.keys[order], *nothing)
    keys = flips.keys[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
    due_SL, flipped, lost = (
        np.add.reduceat(table[order], first, axis=0) for table in (flips.due, flips.flipped, flips.lost)
    )
    tokens, num_apart, expected, *_ = (np.add.reduceat(part[order], first) for part in flips.by_token)
    # If a sample has several runs, the one that speaks most against it.
    group = np.repeat(np.arange(len(first)), np.diff([*first, len(order)]))
    best = order[np.lexsort((flips.by_token.run[order], group))][np.append(first[1:], len(order)) - 1]
    run, start, stop = (part[best] for part in flips.by_token[3:])
    fresh = np.logical_and.reduceat(flips.fresh[order], first)
    by_token = Disagreement(tokens, num_apart, expected, run, start, stop)
    return SampleFlips(keys[first], due_SL, flipped, lost, flips.apart, flips.ends, flips.answers, by_token, fresh)
