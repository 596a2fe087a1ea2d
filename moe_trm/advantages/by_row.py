"""Advantages from one reward per sample, compared within the samples of a prompt.

Shape letters: N samples, D reward dimensions. Arrays are NumPy float64; `group_ids` may be any integers in any order.
There is one value for every sampled token of the row. Token-level estimators are in `batch.token_advantages`.

A sample may be alone in its group, because the others were rejected. `lone` says what it gets: `zero`, for there is
nothing to compare with, or `reward`, as if the others' mean were 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_trm.errors import ConfigError
from moe_trm.methods.advantages import Lone

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

    def centered(self, values: Array, lone: Lone = "zero") -> Array:
        """Values minus the mean of their group; exactly 0 in a group of equal values, despite rounding.

        With `lone="reward"` the only value of a group stays as it is.
        """
        result: Array = np.where(self.spread(values) == 0, 0.0, values - self.mean(values))
        return np.where(self.size == 1, values, result) if lone == "reward" else result

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


def grpo(rewards: Array, group_ids: Array, *, normalize_std: bool = True, lone: Lone = "reward") -> Array:
    """GRPO: A_i = (R_i - mean_g) / (std_g + 1e-6), std with n - 1.

    Without `normalize_std`, A_i = R_i - mean_g, as in Dr.GRPO.

    A group of equal rewards gets 0. A group of one has mean 0 and std 1, so A = R, as in verl; 0 with `lone="zero"`.
    Source: GRPO (arXiv 2402.03300), Dr.GRPO (2503.20783).

    When: the default, with groups of 8 or more.
    """
    rewards, groups = np.asarray(rewards, np.float64), Groups(group_ids)
    scale = groups.std(rewards) + EPSILON if normalize_std else np.ones_like(rewards)
    result: Array = groups.centered(rewards, lone) / np.where(groups.size == 1, 1.0, scale)
    return result


def rloo(rewards: Array, group_ids: Array, *, lone: Lone = "zero") -> Array:
    """RLOO: reward minus the mean of the others, A_i = n / (n - 1) (R_i - mean_g).

    0 in a group of one, where there are no others; verl gives it A = R, as `lone="reward"` does. TRL and slime know
    whole groups only.
    Source: RLOO (arXiv 2402.14740).

    When: small groups; unbiased, and large rewards are not scaled down.
    """
    rewards, groups = np.asarray(rewards, np.float64), Groups(group_ids)
    result: Array = groups.centered(rewards, lone) * groups.size / np.maximum(groups.size - 1, 1)
    return result


def opo(rewards: Array, group_ids: Array, num_tokens: Array, *, lone: Lone = "zero") -> Array:
    """OPO: A_i = R_i - b_g, with the length-weighted baseline b_g = sum_j T_j R_j / sum_j T_j.

    0 in a group of one; verl gives it A = R, as `lone="reward"` does. Source: OPO (arXiv 2505.23585).

    When: lengths differ much within a group.
    """
    rewards, lengths, groups = np.asarray(rewards, np.float64), np.asarray(num_tokens, np.float64), Groups(group_ids)
    weight = groups.sum(lengths)
    result = rewards - groups.sum(lengths * rewards) / np.where(weight > 0, weight, 1.0)
    return np.where(groups.size == 1, rewards if lone == "reward" else 0.0, result)


def opob(rewards: Array, group_ids: Array, log_weights: Array, energies: Array, *, lone: Lone = "zero") -> Array:
    """OPOB of VCPO: A_i = R_i - b_g, b_g = sum_j w_j^2 E_j R_j / sum_j w_j^2 E_j, the baseline of least variance off
    policy.

    w is the ratio of the whole row, policy at the step's start over rollout, and E = sum_t (1 - 2 p_t + sum_v p_v^2)
    the squared norm of its score with respect to the logits, which stands for that with respect to the weights: exact
    norms need a backward pass for each row. Only ratios of w within a prompt matter. A row whose ratio is not finite
    counts for nothing in the baseline. 0 in a group of one, and where no ratio of a group is known; the reward with
    `lone="reward"`.
    Source: VCPO (arXiv 2602.17616), with a proxy for its gradient norms.

    When: samples are old and their ratios differ much; pair it with `optimizer.ess_scale`. Costs three numbers of each
    row, gathered once a step, and the anchors' pass.

    Args:
        rewards, group_ids: `[N]`.
        log_weights: `[N]` log w. energies: `[N]` E.
    """
    rewards, groups = np.asarray(rewards, np.float64), Groups(group_ids)
    log_weights = np.asarray(log_weights, np.float64)
    finite = np.isfinite(log_weights)
    top = np.full(groups.index.max(initial=-1) + 1, -np.inf)
    np.maximum.at(top, groups.index[finite], log_weights[finite])
    gap = np.where(finite, log_weights, 0.0) - np.where(finite, top[groups.index], 0.0)
    weight = np.where(finite, np.exp(2 * gap) * np.asarray(energies, np.float64), 0.0)
    result = rewards - groups.sum(weight * rewards) / (groups.sum(weight) + 1e-8)
    result = np.where(groups.sum(finite.astype(np.float64)) > 0, result, 0.0)
    lone_values = rewards if lone == "reward" else np.zeros_like(rewards)
    return np.where(groups.size == 1, lone_values, result)


def gpg(rewards: Array, group_ids: Array, *, scale: float = 1.0, lone: Lone = "zero") -> Array:
    """GPG: A_i = alpha (R_i - mean_g) / scale, alpha = N / #(R != 0): all-zero rewards do not dilute the gradient.

    With no reward at all everything is 0. 0 in a group of one; verl gives it alpha R / scale, as `lone="reward"` does.
    Source: GPG (arXiv 2504.02546).

    When: most groups have no reward at all.
    """
    rewards = np.asarray(rewards, np.float64)
    alpha = len(rewards) / max(int(np.count_nonzero(rewards)), 1)
    return Groups(group_ids).centered(rewards, lone) * alpha / scale


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


def gdpo(rewards_ND: Array, group_ids: Array, weights_D: Array, num_tokens: Array, *, lone: Lone = "reward") -> Array:
    """GDPO: GRPO of each reward dimension, weighted sum, then whitened over the sampled tokens of the batch.

    Long answers count more in mean and variance than short ones (`whiten_rows`), as in verl.
    Source: GDPO (arXiv 2601.05242), as in verl.

    When: several rewards of different scale, none of which may drown the others.
    """
    columns = np.asarray(rewards_ND, np.float64).T
    parts = [weight * grpo(column, group_ids, lone=lone) for column, weight in zip(columns, weights_D, strict=True)]
    return whiten_rows(np.sum(parts, axis=0), num_tokens)


def reinforce_plus_plus(rewards: Array, num_tokens: Array) -> Array:
    """REINFORCE++: the reward on every token, whitened over all sampled tokens of the batch (`whiten_rows`).

    Source: REINFORCE++ (arXiv 2501.03262), without discount: the return of every token is the reward.

    When: one sample for each prompt, or groups too small to compare.
    """
    return whiten_rows(np.asarray(rewards, np.float64), num_tokens)


def reinforce_plus_plus_baseline(rewards: Array, group_ids: Array, num_tokens: Array, *, lone: Lone = "zero") -> Array:
    """REINFORCE++ with baseline: reward minus the group mean on every token, whitened over the batch.

    Source: REINFORCE++ (arXiv 2501.03262).

    When: groups whose spread says little; prompts of different difficulty keep their weight.
    """
    return whiten_rows(Groups(group_ids).centered(np.asarray(rewards, np.float64), lone), num_tokens)


def remax(rewards: Array, baselines: Array) -> Array:
    """ReMax: A_i = R_i - R(greedy), the reward of the greedy answer to the same prompt.

    The baseline does not depend on the sample, so the gradient stays unbiased, also where the greedy answer came from
    weights before or after the sample's. Nothing is compared within a group, so one sample of a prompt is enough.
    A KL in the reward lowers the samples' rewards alone, as in verl. The advantage of a token of verl is its
    reward-to-go minus the baseline; with one reward for the whole answer the two are equal.
    Source: ReMax (arXiv 2310.10505); `remax` of verl.

    When: one or few samples of each prompt. Costs one greedy answer and its reward for each prompt.

    Args:
        rewards: `[N]`.
        baselines: `[N]` reward of the greedy answer to the prompt of each row.
    """
    result: Array = np.asarray(rewards, np.float64) - np.asarray(baselines, np.float64)
    return result


def whiten_rows(values: Array, num_tokens: Array) -> Array:
    """Row values whitened over all *tokens* of the batch; each token carries the value of its row.

    Equals `whiten` on tokens.

    (x - m) / sqrt(v + 1e-8) with m = sum_i T_i x_i / M, v = sum_i T_i (x_i - m)^2 / (M - 1), M = sum_i T_i.
    """
    lengths = np.asarray(num_tokens, np.float64)
    total = float(lengths.sum())
    if total == 0:
        return values
    centered = values - (lengths * values).sum() / total
    variance = (lengths * centered**2).sum() / (total - 1) if total > 1 else 1.0
    return np.asarray(centered / np.sqrt(variance + 1e-8))


def whiten(values: Array) -> Array:
    """(x - mean) / sqrt(var + 1e-8), var with n - 1; fewer than two values are only centered."""
    if len(values) == 0:
        return values
    variance = values.var(ddof=1) if len(values) > 1 else 1.0
    return np.asarray((values - values.mean()) / np.sqrt(variance + 1e-8))
