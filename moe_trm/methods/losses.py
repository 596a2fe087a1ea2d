"""The built-in losses by name: the table that the configuration checks and `moe_trm.losses` imports from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Held = Literal["own", "total", "none"]
"""The ratio that a loss contains: the one it is written on, the total one whatever that is, or none."""

Need = Literal["entropy", "groups", "routers"]
"""Inputs that not every run has: the policy's entropy, all samples of a prompt in one minibatch, and how far
the routers have moved since the anchor."""

DEFAULT_LOSS = "ppo_clip"
"""The loss where neither the configuration nor its preset names one."""


@dataclass(frozen=True)
class LossEntry:
    """One row of the table.

    Attributes:
        module: of `moe_trm.losses`, where the loss is defined.
        needs: inputs that not every run has.
        holds: the ratio that its gradient depends on. A rule must not weigh by any part of it a second time.
        ratio: the one it is written on, unless told otherwise.
    """

    module: str
    needs: tuple[Need, ...] = ()
    holds: Held = "own"
    ratio: str = "update"


LOSSES: Mapping[str, LossEntry] = MappingProxyType(
    {
        "acr_clip": LossEntry("acr_clip"),
        "aspo": LossEntry("aspo"),
        "capped_ratio": LossEntry("capped_ratio", ratio="total"),
        "cispo": LossEntry("cispo"),
        "clip_cov": LossEntry("covariance"),
        "ctpo": LossEntry("ctpo"),
        "dispo": LossEntry("dispo"),
        "dppo_kl": LossEntry("dppo", ratio="total"),
        "dppo_tv": LossEntry("dppo", ratio="total"),
        "dro": LossEntry("dro"),
        "espo": LossEntry("espo", needs=("entropy",)),
        "gmpo": LossEntry("gmpo"),
        "gpg": LossEntry("reinforce", holds="none", ratio="total"),
        "gspo": LossEntry("gspo"),
        "gspo_token": LossEntry("gspo"),
        "ipo_tv": LossEntry("ipo_tv", ratio="total"),
        "kl_cov": LossEntry("covariance"),
        "m2po_clip": LossEntry("m2po_clip"),
        "minirl": LossEntry("minirl", holds="total"),
        "minpro": LossEntry("minpro"),
        "oapl": LossEntry("oapl", needs=("groups",), ratio="total"),
        "ppo_clip": LossEntry("ppo_clip"),
        "quatro": LossEntry("quatro"),
        "quatro_query": LossEntry("quatro", needs=("groups",)),
        "r2vpo": LossEntry("r2vpo"),
        "r2vpo_clip": LossEntry("r2vpo", needs=("groups",)),
        "reinforce": LossEntry("reinforce", holds="none", ratio="total"),
        "rspo": LossEntry("rspo", needs=("routers",)),
        "sapo": LossEntry("sapo"),
        "tbpo": LossEntry("tbpo"),
        "topr": LossEntry("topr", ratio="total"),
        "turn_ppo": LossEntry("turn_ppo"),
        "unclipped": LossEntry("unclipped"),
        "vespo": LossEntry("vespo", ratio="total"),
    }
)


def contains_lag(name: str, ratio: str | None = None) -> bool:
    """True where the loss weighs by how far weights moved since sampling; one of the user's own may do so.

    `ratio` is the one it is told to read, None its own.
    """
    entry = LOSSES.get(name)
    if entry is None:
        return True
    read = "total" if entry.holds == "total" else ratio or entry.ratio
    return entry.holds != "none" and read in ("lag", "merged", "staleness", "total")


def needs(name: str | None) -> tuple[Need, ...]:
    """Inputs that a built-in loss needs; one of the user's own says them itself, when it is loaded."""
    return LOSSES[name].needs if name is not None and name in LOSSES else ()
