"""The built-in losses by name: the table that the configuration checks and `moe_trm.losses` imports from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from moe_trm.methods.built_in import declarations
from moe_trm.methods.ratios import PARTS

Held = Literal["own", "total", "none"]
"""The ratio that a loss contains: the one it is written on, the total one whatever that is, or none."""

Need = Literal["entropy", "groups", "reference", "routers"]
"""Inputs that not every run has: the policy's entropy, all samples of a prompt in one minibatch, log-probs under the
reference, and how far the routers have moved since the anchor."""

DEFAULT_LOSS = "ppo_clip"
"""The loss where neither the configuration nor its preset names one."""


@dataclass(frozen=True)
class LossEntry:
    """One row of the table.

    Attributes:
        module: of `moe_trm.losses`, where the loss is defined.
        ratio: the one it is written on, unless told otherwise.
        scope: `token`, `sequence` or `batch`.
        needs: inputs that not every run has.
        holds: the ratio that its gradient depends on. A rule must not weigh by any part of it a second time.
    """

    module: str
    ratio: str
    scope: str
    needs: Sequence[Need] = ()
    holds: Held = "own"


LOSSES: Mapping[str, LossEntry] = MappingProxyType(
    {name: LossEntry(**entry) for name, entry in declarations("losses").items()}
)


def contained(holds: Held, ratio: str) -> frozenset[str]:
    """The parts of the total ratio that a gradient depends on, of a loss that is told to read `ratio`."""
    return frozenset() if holds == "none" else PARTS["total" if holds == "total" else ratio]


def needs(name: str | None) -> Sequence[Need]:
    """Inputs that a built-in loss needs; one of the user's own says them itself, when it is loaded."""
    return LOSSES[name].needs if name is not None and name in LOSSES else ()
