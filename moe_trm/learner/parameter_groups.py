"""Learning rate and weight decay of each parameter, and the parameters that are not trained.

Parameters have their Hugging Face names, the same in every learner. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moe_trm.config.schema import LearnerConfig, OptimizerConfig
from moe_trm.errors import ConfigError
from moe_trm.models.multimodal import is_vision

ROUTER = re.compile(r"\.(mlp|block_sparse_moe)\.(gate|router)\.(weight|bias)$")
INDEXER = re.compile(r"\.indexer\.")
"""Weights that choose the tokens of sparse attention: no gradient comes through the choice."""


@dataclass(frozen=True, order=True)
class GroupSettings:
    """`lr_multiplier` times the scheduled rate, and `weight_decay`."""

    lr_multiplier: float
    weight_decay: float


def settings_of(hf_names: Sequence[str], *, is_matrix: bool, optimizer: OptimizerConfig) -> GroupSettings:
    """The settings of one parameter that holds the tensors `hf_names`, from the first group that matches.

    Where no group says otherwise, weight decay acts on matrices only: norm weights and biases are exempt.

    Raises:
        ConfigError: tensors that the learner holds in one parameter under different settings.
    """
    group_settings = {_settings_of(name, is_matrix, optimizer) for name in hf_names}
    if len(group_settings) > 1:
        raise ConfigError(
            "a parameter group takes part of a fused parameter",
            where="optimizer.groups",
            got=f"different settings for {', '.join(hf_names)}",
            expected="one group for all of them",
            fix="match all of them, e.g. `self_attn`, or none",
        )
    return group_settings.pop()


def check_groups(optimizer: OptimizerConfig, hf_names: Collection[str]) -> None:
    """Raise `ConfigError` for a group that takes no parameter of the model, all of whose names are `hf_names`."""
    taken = {_group_of(name, optimizer) for name in hf_names}
    for index, group in enumerate(optimizer.groups):
        if index not in taken:
            raise ConfigError(
                "a parameter group takes no parameter",
                where=f"optimizer.groups.{index}.match",
                got=group.match,
                expected="a regular expression found in some name that no earlier group takes",
                fix=f"names look like {min(hf_names, default='')}",
            )


def is_frozen(hf_name: str, learner: LearnerConfig) -> bool:
    """True when this tensor is not trained and stays as in the checkpoint."""
    if INDEXER.search(hf_name) is not None or (learner.freeze_vision and is_vision(hf_name)):
        return True
    return learner.freeze_router and ROUTER.search(hf_name) is not None


def _group_of(hf_name: str, optimizer: OptimizerConfig) -> int | None:
    return next((i for i, group in enumerate(optimizer.groups) if re.search(group.match, hf_name)), None)


def _settings_of(hf_name: str, is_matrix: bool, optimizer: OptimizerConfig) -> GroupSettings:
    # Biases of the experts of a layer may be rows of one matrix.
    usual = optimizer.weight_decay if is_matrix and not hf_name.endswith("bias") else 0.0
    index = _group_of(hf_name, optimizer)
    if index is None:
        return GroupSettings(1.0, usual)
    group = optimizer.groups[index]
    return GroupSettings(group.lr_multiplier, usual if group.weight_decay is None else group.weight_decay)
