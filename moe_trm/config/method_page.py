"""The page of a correction or a loss for a terminal: what it reads, its parameters with their defaults, its text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from moe_trm.config.flat import as_yaml
from moe_trm.errors import ConfigError
from moe_trm.methods.corrections import CORRECTIONS
from moe_trm.methods.losses import LOSSES
from moe_trm.methods.own import is_own
from moe_trm.methods.parameters import declared, hint


def method_page(name: str) -> str | None:
    """The page of a built-in correction or loss, or of a function of the user's own; None: no method is called so.

    Raises `ConfigError` for a function that cannot be loaded, or is neither.
    """
    # They import torch; the other subcommands do without.
    from moe_trm import corrections, losses

    if name in CORRECTIONS or (is_own(name) and not _is_loss(name)):
        rule = corrections.get(name)
        facts = [f"ratio: {rule.ratio}", f"scope: {rule.scope}"]
        facts.append("weighs" if rule.weighs else "rejects, and gives no weights")
        return _page(name, "correction.rules", facts, rule.function, rule.calibrated)
    if name in LOSSES or is_own(name):
        loss = losses.get(name)
        facts = [f"ratio: {loss.ratio}", f"scope: {loss.scope}", f"aggregation: {loss.aggregation}"]
        return _page(name, "loss.name", [*facts, *(f"needs {need}" for need in loss.needs)], loss.function, ())
    return None


def _is_loss(name: str) -> bool:
    from moe_trm import losses

    try:
        losses.get(name)
    except ConfigError:
        return False
    return True


def _page(
    name: str, setting: str, facts: Sequence[str], function: Callable[..., Any], calibrated: Sequence[str]
) -> str:
    what = "thresholds" if setting == "correction.rules" else "parameters"
    parameters = [f"    {line}" for line in _parameters(function, calibrated)]
    text = inspect.getdoc(function) or "no documentation"
    return "\n".join(
        [f"{name}  ({setting})", f"  {', '.join(facts)}", f"  {what}:", *(parameters or ["    none"]), "", text]
    )


def _parameters(function: Callable[..., Any], calibrated: Sequence[str]) -> Iterator[str]:
    required, defaults = declared(function)
    for name in (*required, *defaults):
        value = f"default {as_yaml(defaults[name])}" if name in defaults else "required"
        chosen = "; or chosen by target_reject_rate" if name in calibrated else ""
        yield f"{name}: {_type(hint(function, name, function.__name__))}, {value}{chosen}"


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    if get_args(annotation):
        return " or ".join(_type(part) for part in get_args(annotation))
    words = {float: "number", int: "whole number", bool: "true or false", str: "text", type(None): "none"}
    return words.get(annotation, str(annotation))
