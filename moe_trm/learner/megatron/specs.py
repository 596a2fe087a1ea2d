"""Parts of Megatron's layer specifications, which are a `ModuleSpec` or, from 0.19 on, a `partial` of a class."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any


def submodules_of(spec: Any) -> Any:
    """The modules that `spec` builds its module from."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def with_module(spec: Any, module: type) -> Any:
    """`spec` with another class in place of its own."""
    if isinstance(spec, partial):
        return partial(module, *spec.args, **spec.keywords)
    return replace(spec, module=module)
