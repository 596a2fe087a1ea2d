"""Groups that were trained and may be trained again: within the bound on age, and a bounded number of times.

A draw of fixed size gives the younger the greater chance, and has weights that undo this in expectation. Shape letter:
N items to draw from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_trm.config.schema import PipelineConfig
from moe_trm.rollout.store.ledger import Ledger
from moe_trm.rollout.store.store import Group
from moe_trm.types import TrainRow


@dataclass(frozen=True)
class Again:
    """A group that a step trains again, with the importance weight of its draw."""

    group: Group
    weight: float


@dataclass
class _Held:
    group: Group
    uses: int


class ReuseBuffer:
    """Buffer of trained groups, from which each step draws some; with `reuse_groups` of 0 nothing is kept.

    Groups leave it when their oldest token is beyond the bound on age, or when they have been used up. Draws depend on
    the seed, the step and what the buffer holds, and on nothing else. `ledger` counts the uses.
    """

    def __init__(self, pipeline: PipelineConfig, ledger: Ledger, seed: int) -> None:
        self._settings, self._ledger, self._seed = pipeline, ledger, seed
        self._held: dict[int, _Held] = {}
        self._missing: dict[int, int] = {}
        self._weights: list[float] = []

    @property
    def missing(self) -> Mapping[int, int]:
        """Uses of the groups of a restored buffer that have to be put back, by group id."""
        return dict(self._missing)

    def put_back(self, group: Group) -> None:
        """Give a group of `missing` its place again."""
        self._held[group.group_id] = _Held(group, self._missing.pop(group.group_id))

    def draw(self, step: int, version: int) -> list[Again]:
        """Groups that `step` trains again, for a learner at `version`, in the order of issue.

        There are fewer than asked for where the buffer holds no more. Each of their samples counts as used once more.
        """
        self._weights = []
        bound = self._settings.staleness_limit
        self._held = {key: held for key, held in self._held.items() if version - held.group.oldest_version <= bound}
        candidates = [self._held[key] for key in sorted(self._held)]
        if not candidates:
            return []
        ages = np.array([version - held.group.oldest_version for held in candidates], np.float64)
        count = min(self._settings.reuse_groups, len(candidates))
        priorities = freshness(ages, self._settings.reuse_tau)
        if self._settings.reuse_priority == "spread":
            priorities = priorities * [
                spread([record.reward for record in held.group.kept if record.reward is not None])
                for held in candidates
            ]
        odds = chances(priorities, count)
        weights = importance(odds, count, self._settings.reuse_correction)
        places = drawn(odds, float(np.random.default_rng((self._seed, step, 2)).random()))
        for place in places:
            candidates[place].uses += 1
            self._ledger.reuse(len(candidates[place].group.kept))
        self._held = {key: held for key, held in self._held.items() if held.uses < self._settings.max_uses}
        self._weights = [float(weights[place]) for place in places]
        return [Again(candidates[place].group, float(weights[place])) for place in places]

    def keep(self, groups: Sequence[Group]) -> None:
        """Hold what a step has trained for the first time."""
        if self._settings.reuse_groups:
            self._held |= {group.group_id: _Held(group, 1) for group in groups if group.kept}

    def metrics(self) -> dict[str, float]:
        """Figures of the last draw. Empty where nothing is ever used again.

        `reuse/groups`: trained again in this step; `reuse/held`: groups that may still be; `reuse/weight_max`: the
        largest importance weight of the draw; `ledger/reused`: uses of samples beyond their first, since the start.
        """
        if not self._settings.reuse_groups:
            return {}
        largest = {"reuse/weight_max": max(self._weights)} if self._weights else {}
        return {
            "reuse/groups": float(len(self._weights)),
            "reuse/held": float(len(self._held)),
            **largest,
            "ledger/reused": float(self._ledger.reused),
        }

    def state(self) -> list[tuple[int, int]]:
        """Group ids and uses, for a resumed run that can have the same samples again."""
        return [(key, self._held[key].uses) for key in sorted(self._held)]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Continue after `state`, once the groups of `missing` are put back."""
        self._missing = {int(group_id): int(uses) for group_id, uses in state}


def with_weights(rows: Sequence[TrainRow], again: Sequence[Again]) -> list[TrainRow]:
    """The rows of a step; groups that it trains again have the weight of their draw."""
    weights = {reused.group.group_id: reused.weight for reused in again}
    return [
        replace(row, weight=weights[row.record.group_id]) if row.record.group_id in weights else row for row in rows
    ]


Array = np.ndarray
LEAST = 0.05
"""Priority by spread of a group whose rewards are equal. Ours."""


def freshness(ages_N: Array, tau: float) -> Array:
    """`[N]` priority of each item: exp(-age / tau), for ages in versions.

    Source: freshness-aware prioritised replay (arXiv 2604.16918), whose priorities decay with age in this way. The
    constant tau is ours.
    """
    # Only the proportions matter, and the youngest must not vanish with the others.
    priorities: Array = np.exp(-(ages_N - ages_N.min()) / tau)
    return priorities


def spread(rewards: Sequence[float]) -> float:
    """Priority of a group by its rewards: their standard deviation, and `LEAST`, so that every group may be drawn.

    Its samples have advantages of that size. Source: prioritised replay, |error| + epsilon (arXiv 1511.05952); the
    spread of rewards in the place of the error is ours.
    """
    return float(np.std(rewards)) + LEAST


def chances(priorities_N: Array, count: int) -> Array:
    """`[N]` chance of each item to be among `count` drawn ones: proportional to its priority, at most 1.

    pi_i = min(1, c p_i), with c such that the sum is `count`. With `count` of N or more, everything is drawn.
    """
    if count >= len(priorities_N):
        return np.ones(len(priorities_N))
    certain = np.zeros(len(priorities_N), bool)
    while True:
        rest_sum = priorities_N[~certain].sum()
        scaled = np.where(certain, 1.0, priorities_N * (count - certain.sum()) / rest_sum)
        over = ~certain & (scaled >= 1)
        if not over.any():
            return scaled
        certain |= over


def drawn(chances_N: Array, start: float) -> list[int]:
    """Places of the drawn items, ascending: systematic sampling from `start` in [0, 1).

    Item i has the interval from sum_{j<i} pi_j to sum_{j<=i} pi_j, and is drawn if start + k is in it for an integer k.
    So its chance over all starts is pi_i exactly, and none is drawn twice. Source: Madow 1949.
    """
    if not len(chances_N):
        return []
    ends = np.cumsum(chances_N)
    count = round(float(ends[-1]))
    ends[-1] = count  # of rounding
    places = np.searchsorted(ends, start + np.arange(count), side="right")
    return sorted(set(places.tolist()))


def importance(chances_N: Array, count: int, power: float) -> Array:
    """`[N]` weight of each item if it is drawn: ((count / N) / pi_i)^power, or 1 where everything is drawn.

    With power 1 the weighted sum over the drawn items has the expectation of an even draw of as many. Source:
    importance sampling of prioritised replay (arXiv 1511.05952), in the form of Horvitz and Thompson 1952 for draws
    without repetition.
    """
    even = min(1.0, count / max(1, len(chances_N)))
    return (even / chances_N) ** power
