"""Off-policy corrections by name. A new one is a file and a test."""

from __future__ import annotations

from importlib import import_module

from moe_trm.corrections.calibration import calibrate, scores
from moe_trm.corrections.compose import compose, measuring
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.rule import BoundRule, RegisteredRule
from moe_trm.methods.corrections import CORRECTIONS
from moe_trm.methods.own import is_own, load_own
from moe_trm.methods.parameters import unknown
from moe_trm.methods.presets import PRESETS, Preset
from moe_trm.methods.summable import add, finalize

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
    "measuring",
    "names",
    "presets",
    "scores",
]

presets = PRESETS


def names() -> tuple[str, ...]:
    """The built-in corrections, sorted."""
    return tuple(sorted(CORRECTIONS))


def get(name: str) -> RegisteredRule:
    """The correction called `name`: a built-in one, or the user's own under `@rule`, `path/to/file.py:function`.

    Raises:
        ConfigError: an unknown name, with the nearest one, or a function that cannot be loaded or is no rule.
    """
    key = "correction.rules"
    if is_own(name):
        decorator, source = '@rule(ratio="engine", scope="token")', "moe_trm.corrections.rule"
        return load_own(
            name, RegisteredRule, CORRECTIONS, what="correction", key=key, decorator=decorator, source=source
        )
    if name not in CORRECTIONS:
        raise unknown("correction", name, CORRECTIONS, key)
    built_in: RegisteredRule = getattr(import_module(f"moe_trm.corrections.{CORRECTIONS[name].module}"), name)
    return built_in
