"""Advantages by the name in `advantage.name`: one value for each row, from rewards, groups and lengths alone.

Shape letter: N rows.

GDPO reads the parts of a reward as well. Those that differ along a row are in `batch.token_advantages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moe_trm.advantages import by_row as estimators
from moe_trm.advantages.by_row import Array, Groups
from moe_trm.methods.advantages import ADVANTAGES, Lone
from moe_trm.methods.parameters import unknown


def outcome_advantages(
    name: str,
    rewards: Array,
    group_ids: Array,
    num_tokens: Array,
    *,
    normalize_std: bool = True,
    lone: Lone | None = None,
    baselines: Array | None = None,
) -> Array:
    """The advantage of each row under the estimator `name`, `[N]` float64. Raises `ConfigError` for an unknown name.

    `normalize_std` is for `grpo` and `pass_at_k`. `lone`: what a sample gets that is alone in its group; None: as in
    `ADVANTAGES`. `baselines`: `[N]` reward of the greedy answer to each row's prompt, for `remax` alone.
    """
    if name == REMAX:
        assert baselines is not None, "remax reads the rewards of greedy answers"
        return estimators.remax(rewards, baselines)
    if name not in OUTCOME:
        raise unknown("advantage", name, OUTCOME, "advantage.name")
    result: Array = OUTCOME[name](
        np.asarray(rewards, np.float64),
        np.asarray(group_ids),
        np.asarray(num_tokens),
        normalize_std,
        lone or ADVANTAGES[name].lone or "zero",
    )
    return result


REMAX = "remax"
"""The estimator that compares with a greedy answer."""

GDPO = "gdpo"
"""The estimator that compares each part of a reward by itself."""


def advantages_by_part(
    parts: Sequence[Mapping[str, float]],
    group_ids: Array,
    weights: Mapping[str, float],
    num_tokens: Array,
    *,
    lone: Lone | None = None,
) -> Array:
    """GDPO's advantage of each row from its named rewards, `[N]` float64; a name without a weight has weight 1.

    All have the same names. `num_tokens` and `lone` as in `outcome_advantages`.
    """
    names = sorted(parts[0])
    rewards_ND = np.array([[part[name] for name in names] for part in parts], np.float64).reshape(
        len(parts), len(names)
    )
    weights_N = np.array([weights.get(name, 1.0) for name in names])
    return estimators.gdpo(
        rewards_ND,
        np.asarray(group_ids),
        weights_N,
        np.asarray(num_tokens),
        lone=lone or ADVANTAGES[GDPO].lone or "zero",
    )


def explained_variance(rewards: Array, group_ids: Array) -> dict[str, float]:
    """`reward/explained_variance` = 1 - Var(R - b) / Var(R), b the mean reward of the others of a sample's group.

    The share of the rewards' spread that a group's baseline takes away, as `vf_explained_var` is a critic's: near 1,
    prompts differ and their samples hardly do; 0, the baseline says nothing; below 0, it adds noise. Samples alone in
    their group are left out. Empty where no others are left, or rewards are all the same.
    """
    groups = Groups(group_ids)
    several = groups.size > 1
    values = np.asarray(rewards, np.float64)[several]
    if not len(values) or np.ptp(values) == 0:
        return {}
    advantages = estimators.rloo(values, np.asarray(group_ids)[several])
    return {"reward/explained_variance": float(1 - advantages.var() / values.var())}


def _pass_at_k(rewards: Array, group_ids: Array, _num_tokens: Array, normalize_std: bool, _lone: Lone) -> Array:
    # Rejected samples may leave one of a group: alone, it has nothing to be compared with.
    several = Groups(group_ids).size > 1
    result = np.zeros_like(rewards)
    result[several] = estimators.pass_at_k(rewards[several], group_ids[several], normalize_std=normalize_std)
    return result


OUTCOME: dict[str, Callable[[Array, Array, Array, bool, Lone], Any]] = {
    "grpo": lambda r, g, t, std, lone: estimators.grpo(r, g, normalize_std=std, lone=lone),
    "dr_grpo": lambda r, g, t, std, lone: estimators.grpo(r, g, normalize_std=False, lone=lone),
    "rloo": lambda r, g, t, std, lone: estimators.rloo(r, g, lone=lone),
    "opo": lambda r, g, t, std, lone: estimators.opo(r, g, t, lone=lone),
    "gpg": lambda r, g, t, std, lone: estimators.gpg(r, g, lone=lone),
    "pass_at_k": _pass_at_k,
    "reinforce_plus_plus": lambda r, g, t, std, lone: estimators.reinforce_plus_plus(r, t),
    "reinforce_plus_plus_baseline": lambda r, g, t, std, lone: estimators.reinforce_plus_plus_baseline(
        r, g, t, lone=lone
    ),
}
