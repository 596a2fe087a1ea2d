"""Off-policy corrections by name. A new one is a file with a decorated function, a line below, and a test."""

from __future__ import annotations

from importlib import import_module

from moe_trm.corrections.calibration import calibrate, scores
from moe_trm.corrections.compose import compose
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.preset import PRESETS, Preset
from moe_trm.corrections.rule import BoundRule, RegisteredRule
from moe_trm.functions.parameters import unknown
from moe_trm.summable import add, finalize

__all__ = [
    "BoundRule",
    "Correction",
    "Evidence",
    "Preset",
    "RegisteredRule",
    "add",
    "calibrate",
    "compose",
    "finalize",
    "get",
    "names",
    "presets",
    "scores",
]

presets = PRESETS

_MODULE_OF = {
    "geometric_mask": "geometric_mask",
    "icepop": "icepop",
    "ln_trm": "ln_trm",
    "m2po": "m2po",
    "opsm": "opsm",
    "seq_max_k2": "rejection",
    "seq_max_k3": "rejection",
    "seq_mean_k1": "rejection",
    "seq_mean_k2": "rejection",
    "seq_mean_k3": "rejection",
    "seq_mis": "mis",
    "seq_sum_k1": "rejection",
    "seq_sum_k2": "rejection",
    "seq_sum_k3": "rejection",
    "seq_tis": "tis",
    "ser": "ser",
    "token_k1": "rejection",
    "token_k2": "rejection",
    "token_k3": "rejection",
    "token_mis": "mis",
    "token_tis": "tis",
    "token_veto": "token_veto",
    "trm_avg": "trm",
    "trm_max": "trm",
    "trm_max_avg": "trm",
}


def names() -> tuple[str, ...]:
    """The registered corrections, sorted."""
    return tuple(sorted(_MODULE_OF))


def get(name: str) -> RegisteredRule:
    """The correction registered as `name`; `ConfigError` with the nearest name if there is none."""
    if name not in _MODULE_OF:
        raise unknown("correction", name, _MODULE_OF, "correction.rules")
    registered: RegisteredRule = getattr(import_module(f"moe_trm.corrections.{_MODULE_OF[name]}"), name)
    return registered
