"""Advantages from one reward per sample, compared within the samples of a prompt.

Shape letters: N samples, D reward dimensions. Arrays are NumPy float64; `group_ids` may be any integers in any order.
Values are those of every sampled token of the row. Token-level estimators are in `batch.token_advantages`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_trm.errors import ConfigError

Array = NDArray[Any]
EPSILON = 1e-6


class Groups:
    """Sums within groups, without a loop over them.

    `index[i]` is the group of sample `i`, `size[i]` its number of samples.
    """

    def __init__(self, group_ids: Array) -> None:
        _, self.index = np.unique(np.asarray(group_ids), return_inverse=True)
        self.size = self.sum(np.ones(len(self.index)))

    def sum(self, values: Array) -> Array:
        """Sum over each sample's group, `[N]`."""
        totals: Array = np.bincount(self.index, weights=values)[self.index] if len(values) else np.zeros(0)
        return totals

    def mean(self, values: Array) -> Array:
        """Mean over each sample's group, `[N]`."""
        return self.sum(values) / self.size

    def centered(self, values: Array) -> Array:
        """Values minus the mean of their group; exactly 0 in a group of equal values, despite rounding."""
        return np.where(self.spread(values) == 0, 0.0, values - self.mean(values))

    def spread(self, values: Array) -> Array:
        """Largest minus smallest value of each sample's group, `[N]`."""
        top, bottom = (np.full(self.index.max(initial=-1) + 1, fill) for fill in (-np.inf, np.inf))
        np.maximum.at(top, self.index, values)
        np.minimum.at(bottom, self.index, values)
        spread: Array = (top - bottom)[self.index]
        return spread

    def std(self, values: Array) -> Array:
        """Sample standard deviation (n - 1) of each sample's group, `[N]`; 1 in a group of one."""
        squares = self.sum(self.centered(values) ** 2)
        return np.where(self.size > 1, np.sqrt(squares / np.maximum(self.size - 1, 1)), 1.0)


def grpo(rewards: Array, group_ids: Array, *, normalize_std: bool = True) -> Array:
    """GRPO: A_i = (R_i - mean_g) / (std_g + 1e-6), std with n - 1.

    Without `normalize_std`, A_i = R_i - mean_g, as in Dr.GRPO.

    A group of equal rewards gets 0. A group of one has nothing to compare with: mean 0 and std 1, so A = R.
    Source: GRPO (arXiv 2402.03300), Dr.GRPO (2503.20783).

    When: the default, with groups of 8 or more.
    """
    rewards, groups = np.asarray(rewards, np.float64), Groups(group_ids)
    scale = groups.std(rewards) + EPSILON if normalize_std else np.ones_like(rewards)
    result: Array = np.where(groups.size == 1, rewards, groups.centered(rewards) / scale)
    return result


def rloo(rewards: Array, group_ids: Array) -> Array:
    """RLOO: reward minus the mean of the others, A_i = n / (n - 1) (R_i - mean_g); 0 in a group of one.

    Source: RLOO (arXiv 2402.14740).

    When: small groups; unbiased, and large rewards are not scaled down.
    """
    rewards, groups = np.asarray(rewards, np.float64), Groups(group_ids)
    result: Array = groups.centered(rewards) * groups.size / np.maximum(groups.size - 1, 1)
    return result


def opo(rewards: Array, group_ids: Array, num_tokens: Array) -> Array:
    """OPO: A_i = R_i - b_g, with the length-weighted baseline b_g = sum_j T_j R_j / sum_j T_j.

    Source: OPO (arXiv 2505.23585).

    When: lengths differ much within a group.
    """
    rewards, lengths, groups = np.asarray(rewards, np.float64), np.asarray(num_tokens, np.float64), Groups(group_ids)
    weight = groups.sum(lengths)
    return rewards - groups.sum(lengths * rewards) / np.where(weight > 0, weight, 1.0)


def remax(rewards: Array, greedy_rewards: Array) -> Array:
    """ReMax: reward minus that of the greedy answer to the same prompt, both `[N]`. Source: ReMax (arXiv 2310.10505).

    When: one sample for each prompt, and the cost of a greedy answer is acceptable.
    """
    return np.asarray(rewards, np.float64) - np.asarray(greedy_rewards, np.float64)


def gpg(rewards: Array, group_ids: Array, *, scale: float = 1.0) -> Array:
    """GPG: A_i = alpha (R_i - mean_g) / scale, alpha = N / #(R != 0): all-zero rewards do not dilute the gradient.

    With no reward at all everything is 0. Source: GPG (arXiv 2504.02546).

    When: most groups have no reward at all.
    """
    rewards = np.asarray(rewards, np.float64)
    return Groups(group_ids).centered(rewards) * (len(rewards) / max(int(np.count_nonzero(rewards)), 1)) / scale


def pass_at_k(rewards: Array, group_ids: Array, *, normalize_std: bool = True) -> Array:
    """pass@k: only the best sample of a group gets anything, its lead over the second best (over std + 1e-6).

    Ties for the best give 0. Source: pass@k training, as in verl.

    When: the best of several tries counts, not the average one.

    Raises:
        ConfigError: a group of one.
    """
    rewards, groups = np.asarray(rewards, np.float64), Groups(group_ids)
    if (groups.size < 2).any():
        raise ConfigError(
            "pass_at_k compares the two best samples of a prompt",
            where="advantage.name",
            got="a group of one sample",
            expected="groups of at least 2",
            fix="raise rollout.group_size or choose grpo",
        )
    order = np.lexsort((-rewards, groups.index))
    first = np.flatnonzero(np.diff(groups.index[order], prepend=-1))
    best, second = order[first], order[first + 1]
    result = np.zeros_like(rewards)
    result[best] = rewards[best] - rewards[second]
    return result / (groups.std(rewards) + EPSILON) if normalize_std else result


def gdpo(rewards_ND: Array, group_ids: Array, weights_D: Array) -> Array:
    """GDPO: GRPO of each reward dimension, weighted sum, then whitened over the batch. Source: GDPO, as in verl.

    When: several rewards of different scale, none of which may drown the others.
    """
    columns = np.asarray(rewards_ND, np.float64).T
    parts = [weight * grpo(column, group_ids) for column, weight in zip(columns, weights_D, strict=True)]
    return whiten(np.sum(parts, axis=0))


def whiten(values: Array) -> Array:
    """(x - mean) / sqrt(var + 1e-8), var with n - 1; fewer than two values are only centered."""
    if len(values) == 0:
        return values
    variance = values.var(ddof=1) if len(values) > 1 else 1.0
    return np.asarray((values - values.mean()) / np.sqrt(variance + 1e-8))
