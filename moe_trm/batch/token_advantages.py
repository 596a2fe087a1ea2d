"""Advantages that differ from token to token. Shape letters: N rows, T tokens.

NumPy float64; `mask` `[N, T]` is True on sampled tokens. Results are 0 elsewhere, and what inputs hold there does not
matter.
"""

from __future__ import annotations

import numpy as np

from moe_trm.batch.advantages import Array, Groups, whiten


def rewards_to_go(rewards: Array, mask: Array, *, gamma: float = 1.0) -> Array:
    """G_t = r_t + gamma G_next, where next is the next sampled token. `rewards` `[N, T]`."""
    rewards, result = np.where(mask, rewards, 0.0), np.zeros(mask.shape)
    carried = np.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        carried = np.where(mask[:, t], rewards[:, t] + gamma * carried, carried)
        result[:, t] = carried
    return np.where(mask, result, 0.0)


def reinforce_plus_plus(rewards: Array, mask: Array, *, gamma: float = 1.0) -> Array:
    """REINFORCE++: discounted reward-to-go, whitened over all sampled tokens of the batch.

    Source: REINFORCE++ (arXiv 2501.03262).

    When: one sample for each prompt, or groups too small to compare.
    """
    return _whitened(rewards_to_go(rewards, mask, gamma=gamma), mask)


def reinforce_plus_plus_baseline(rewards: Array, group_ids: Array, mask: Array) -> Array:
    """REINFORCE++ with baseline: reward `[N]` minus the group mean on every token, whitened over the batch.

    Source: REINFORCE++ (arXiv 2501.03262).

    When: groups whose spread says little; prompts of different difficulty keep their weight.
    """
    return _whitened(Groups(group_ids).centered(np.asarray(rewards, np.float64))[:, None] * mask, mask)


def gae(rewards: Array, values: Array, mask: Array, *, gamma: float = 1.0, lam: float = 0.95) -> tuple[Array, Array]:
    """Generalised advantage estimation: (advantages, returns), both `[N, T]`.

    d_t = r_t + gamma V_next - V_t, A_t = d_t + gamma lam A_next, return = A + V. Tokens that were not sampled pass
    V_next and A_next through. Not whitened. Source: GAE (arXiv 1506.02438).

    When: a critic is trained.
    """
    rewards, values = np.where(mask, rewards, 0.0), np.where(mask, values, 0.0)
    advantages, next_value, next_advantage = np.zeros(mask.shape), np.zeros(len(mask)), np.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = np.where(mask[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = np.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = np.where(mask, advantages, 0.0)
    return advantages, np.where(mask, advantages + values, 0.0)


def otb(
    rewards: Array,
    group_ids: Array,
    mask: Array,
    probs: Array,
    sum_probs_squared: Array,
    *,
    is_weights: Array | None = None,
    zero_tail: bool = True,
) -> Array:
    """Optimal token baseline: A_t = G_t - B_t, B_t = sum_i G W R / (sum_i W R + 1e-8) per prompt and position.

    W_t = cumsum(q), q = 1 - 2 p_t + sum_v p_v^2: a proxy of the squared score norm, times `is_weights`^2 if given. With
    tool tokens positions are counted over sampled tokens alone (TIR-OTB), so rows align by rank. A group of one has B =
    0. With `zero_tail`, B is 0 on the unique longest row beyond the second longest, where it would be compared with
    itself. Source: optimal token baseline (OTB, TIR-OTB), as in verl.

    When: long answers off-policy, where one baseline for all tokens leaves much variance.

    Args:
        rewards: `[N, T]` token rewards; `mask`: `[N, T]`.
        probs, sum_probs_squared: `[N, T]` probability of the sampled token and sum of squared probabilities.
    """
    groups, order = Groups(group_ids), np.argsort(~mask, axis=1, kind="stable")
    packed_mask = np.take_along_axis(mask, order, axis=1)
    energy = np.where(mask, 1 - 2 * probs + sum_probs_squared, 0.0)
    if is_weights is not None:
        energy = energy * np.where(mask, is_weights, 0.0) ** 2
    returns = np.take_along_axis(rewards_to_go(rewards, mask), order, axis=1)
    weight = np.where(packed_mask, np.take_along_axis(energy, order, axis=1).cumsum(axis=1), 0.0)
    baseline = np.zeros_like(returns)
    for t in range(mask.shape[1]):
        baseline[:, t] = groups.sum(returns[:, t] * weight[:, t]) / (groups.sum(weight[:, t]) + 1e-8)
    baseline[groups.size == 1] = 0.0
    if zero_tail:
        baseline[_lonely_tail(groups, packed_mask)] = 0.0
    packed = np.where(packed_mask, returns - baseline, 0.0)
    result: Array = np.zeros_like(packed)
    np.put_along_axis(result, order, packed, axis=1)
    return result


def _lonely_tail(groups: Groups, packed_mask: Array) -> Array:
    """Positions at which a row is the only one of its group that is still running."""
    running = np.zeros(packed_mask.shape)
    for t in range(packed_mask.shape[1]):
        running[:, t] = groups.sum(packed_mask[:, t].astype(np.float64))
    alone: Array = packed_mask & (running == 1)
    return alone


def _whitened(values: Array, mask: Array) -> Array:
    result = np.zeros(mask.shape)
    result[mask] = whiten(values[mask])
    return result
