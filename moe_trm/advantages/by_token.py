"""Advantages that differ along a row: by token, or by turn. Shape letters: N rows, S scored tokens of one row.

NumPy float64. A row is a list entry, because rows differ in length. Only sampled tokens are in it, in their order:
prompts and tool outputs have no place, so rows with tools align by the rank of their sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moe_trm.advantages.by_row import Array, Groups, grpo
from moe_trm.batch.collate import recorded_support
from moe_trm.methods.advantages import Lone
from moe_trm.types import RolloutRecord

CAP = 2.0
"""Largest ratio of a token in the weights of `otb`, as of `token_tis`."""


def otb(rewards: Array, group_ids: Array, energies: Sequence[Array], *, lone: Lone = "reward") -> list[Array]:
    """Optimal token baseline: A_t = R - B_t, B_t = sum_i R_i W_it / (sum_i W_it + 1e-8) over the samples of the
    prompt that have a t-th sampled token.

    W_t = cumsum(rho^2 q), q_t = 1 - 2 p_t + sum_v p_v^2: the squared norm of the score with respect to the logits, a
    proxy of that with respect to the weights. rho_t = min(pi_prox / mu, 2) is the ratio of the token, policy at the
    step's start over rollout, truncated as by `token_tis`: off policy the baseline of least variance weighs by its
    square. A token whose ratio is unknown adds nothing to W. p is the distribution that the token was drawn from, as
    it was recorded: over the kept support, where the sum is exact. It is the policy at the weights that sampled, also
    where these are older. Of a recording without the sampling mask only p_t is known, and the sum may be anywhere
    between p_t^2 and p_t^2 + (1 - p_t)^2. That is refused.

    Positions count sampled tokens alone, so rows with tool outputs align by rank (TIR-OTB). B_t is 0 where a row is the
    only one of its group that is still running: it would be compared with itself. A group of one gets its reward; 0
    with `lone="zero"`. Objectives with one ratio for a row, such as `gspo`, take the mean of its advantages, and
    `gspo_token` takes each.
    Source: optimal token baseline (OTB, arXiv 2602.07078; TIR-OTB), as in verl with token weights.

    When: long answers, where one baseline for all tokens leaves much variance. Costs one pass over the recorded support
    on the ranks and the anchors' pass, and needs `sampling_mask.mode=keep`.

    Args:
        rewards, group_ids: `[N]`.
        energies: `[S]` rho_t^2 q_t of each row, as `weighted_energy` gives it.
    """
    rewards, groups = np.asarray(rewards, np.float64), Groups(group_ids)
    result: list[Array] = [np.zeros(0)] * len(rewards)
    for group in range(int(groups.index.max(initial=-1)) + 1):
        members: list[int] = np.flatnonzero(groups.index == group).tolist()
        longest = max(len(energies[i]) for i in members)
        weight, running = np.zeros((len(members), longest)), np.zeros((len(members), longest), bool)
        for place, i in enumerate(members):
            weight[place, : len(energies[i])], running[place, : len(energies[i])] = np.cumsum(energies[i]), True
        baseline = (rewards[members][:, None] * weight).sum(axis=0) / (weight.sum(axis=0) + 1e-8)
        baseline[running.sum(axis=0) == 1] = 0.0
        for i in members:
            lone_is_zero = len(members) == 1 and lone == "zero"
            result[i] = np.zeros(len(energies[i])) if lone_is_zero else rewards[i] - baseline[: len(energies[i])]
    return result


def turn_grpo(
    rewards: Array,
    group_ids: Array,
    turns: Sequence[Array],
    *,
    discount: float = 1.0,
    normalize_std: bool = True,
    lone: Lone = "reward",
) -> list[Array]:
    """GRPO by turn: A_ik = (G_ik - mean_g) / (std_g + 1e-6), over the samples of the prompt that have a k-th turn.

    G_ik = discount^(K_i - k) R_i is the return of turn k of K_i, with the reward of the whole sample. So a turn
    is compared with what others got who came as far, and with `discount` below 1 early turns of long conversations
    count less. Every token of a turn carries its value. Where all samples have one turn it is `grpo`. A sample that
    alone has a k-th turn gets G_ik there; 0 with `lone="zero"`.

    Advantages by turn are in use in several frameworks, but no form is established; this one needs no reward of its own
    for each turn. Source: ours, after GRPO (arXiv 2402.03300) and turn-level credit (2505.11821).

    When: several turns with tools, and samples of a prompt differ in how many they take.

    Args:
        rewards, group_ids: `[N]`.
        turns: `[S]` turn of each token of each row; only their order counts.
    """
    rewards, group_ids = np.asarray(rewards, np.float64), np.asarray(group_ids)
    ranks = [np.unique(row_turns, return_inverse=True)[1] for row_turns in turns]
    counts = np.array([int(row_turns.max(initial=-1)) + 1 for row_turns in ranks], np.int64)
    result: list[Array] = [np.zeros(len(row_turns)) for row_turns in turns]
    for turn in range(int(counts.max(initial=0))):
        rows = np.flatnonzero(counts > turn)
        returns = rewards[rows] * discount ** (counts[rows] - 1 - turn)
        values = grpo(returns, group_ids[rows], normalize_std=normalize_std, lone=lone)
        for i, value in zip(rows, values, strict=True):
            result[i][ranks[i] == turn] = value
    return result


def weighted_energy(record: RolloutRecord, log_ratios: Array) -> Array:
    """`[S]` rho_t^2 q_t of each scored token: `score_energy` by the square of its ratio, which is at most `CAP`.

    0 where the log-ratio `[S]` is NaN.
    """
    weight = np.exp(np.minimum(log_ratios, math.log(CAP)))
    energy: Array = np.nan_to_num(weight, nan=0.0) ** 2 * score_energy(record)
    return energy


def score_energy(record: RolloutRecord) -> Array:
    """`[S]` 1 - 2 p_t + sum_v p_v^2 of each scored token, p the recorded distribution over the kept support.

    Raises `RecordRejected` (`mask_missing`) for a record without it.
    """
    mask, logprobs = recorded_support(record)
    row_of = np.repeat(np.arange(mask.num_rows), np.diff(mask.offsets))
    squares = np.bincount(row_of, weights=np.exp(2.0 * logprobs.astype(np.float64)), minlength=mask.num_rows)
    probs = np.exp(record.rollout_logprobs.astype(np.float64))
    energy: Array = np.maximum(1 - 2 * probs + squares, 0.0)[record.scored]
    return energy
