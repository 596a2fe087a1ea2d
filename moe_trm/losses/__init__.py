"""Policy objectives by name. A new one is a file with a decorated function, a line below, and a test."""

from __future__ import annotations

from importlib import import_module

from moe_trm.functions.parameters import unknown
from moe_trm.losses.aggregate import Aggregation, aggregate
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.objective import BoundObjective, Objective

__all__ = ["Aggregation", "BoundObjective", "LossInputs", "Objective", "TokenLoss", "aggregate", "get", "names"]

_MODULE_OF = {
    "aspo": "aspo",
    "capped_ratio": "capped_ratio",
    "cispo": "cispo",
    "clip_cov": "covariance",
    "ctpo": "ctpo",
    "dispo": "dispo",
    "dppo_kl": "dppo",
    "dppo_tv": "dppo",
    "dro": "dro",
    "espo": "espo",
    "gmpo": "gmpo",
    "gpg": "reinforce",
    "gspo": "gspo",
    "gspo_token": "gspo",
    "ipo_tv": "ipo_tv",
    "kl_cov": "covariance",
    "m2po_clip": "m2po_clip",
    "minirl": "minirl",
    "minpro": "minpro",
    "oapl": "oapl",
    "ppo_clip": "ppo_clip",
    "quatro": "quatro",
    "r2vpo": "r2vpo",
    "reinforce": "reinforce",
    "sapo": "sapo",
    "tbpo": "tbpo",
    "topr": "topr",
    "turn_ppo": "turn_ppo",
    "unclipped": "unclipped",
    "vespo": "vespo",
}


def names() -> tuple[str, ...]:
    """The registered objectives, sorted."""
    return tuple(sorted(_MODULE_OF))


def get(name: str) -> Objective:
    """The objective registered as `name`; `ConfigError` with the nearest name if there is none."""
    if name not in _MODULE_OF:
        raise unknown("loss", name, _MODULE_OF, "loss.name")
    registered: Objective = getattr(import_module(f"moe_trm.losses.{_MODULE_OF[name]}"), name)
    return registered
