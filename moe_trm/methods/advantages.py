"""The built-in advantage estimators by name: the table that the configuration and `moe_trm.batch` read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Lone = Literal["zero", "reward"]
"""Advantage of a sample that is alone in its group, because the others were rejected."""


@dataclass(frozen=True)
class AdvantageEntry:
    """One row of the table.

    Attributes:
        level: one value for a row, for each of its turns, or for each of its tokens.
        lone: what a sample alone in its group gets unless `advantage.lone_sample` says so; None: there is no choice.
        scales: it can divide by the group's standard deviation (`advantage.normalize_std`).
        reads_support: it reads the recorded distribution of every token, and so needs `sampling_mask.mode=keep`.
        reads_ratios: it reads the ratios of policy to rollout at the step's start.
        compares: it compares the samples of a prompt.
        whitens: it divides by the spread over all samples of a step.
        reads_greedy: it reads the reward of a greedy answer to the prompt, which is asked for beside the samples.
    """

    level: Literal["row", "turn", "token"] = "row"
    lone: Lone | None = "zero"
    scales: bool = False
    reads_support: bool = False
    reads_ratios: bool = False
    compares: bool = True
    whitens: bool = False
    reads_greedy: bool = False


ADVANTAGES: Mapping[str, AdvantageEntry] = MappingProxyType(
    {
        "dr_grpo": AdvantageEntry(lone="reward"),
        "gdpo": AdvantageEntry(lone="reward", whitens=True),
        "gpg": AdvantageEntry(),
        "grpo": AdvantageEntry(lone="reward", scales=True),
        "opo": AdvantageEntry(),
        "opob": AdvantageEntry(reads_support=True, reads_ratios=True),
        "otb": AdvantageEntry("token", lone="reward", reads_support=True, reads_ratios=True),
        "pass_at_k": AdvantageEntry(lone=None, scales=True),
        "reinforce_plus_plus": AdvantageEntry(lone=None, compares=False, whitens=True),
        "reinforce_plus_plus_baseline": AdvantageEntry(whitens=True),
        "remax": AdvantageEntry(lone=None, compares=False, reads_greedy=True),
        "rloo": AdvantageEntry(),
        "turn_grpo": AdvantageEntry("turn", lone="reward", scales=True),
    }
)
"""Estimators of `advantage.name`."""

BY_TOKEN = frozenset(name for name, entry in ADVANTAGES.items() if entry.level != "row")
"""Estimators whose values differ along a row."""
