"""A `triton` that can be imported and decorated with, and never run.

SGLang defines its kernels at import time on every platform and launches none of them on the torch-native CPU path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Constexpr:
    """`triton.language.constexpr`: module-level constants read `.value` at import time."""

    def __init__(self, value: object = None) -> None:
        self.value = value


class InertModule(ModuleType):
    """A module that has every attribute: classes for capitalised names, else inert modules (usable as decorators)."""

    # Some importers compare versions at import time.
    __version__ = "3.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__
        self.__spec__ = ModuleSpec(name, InertTritonLoader(), is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value: Any
        if name == "constexpr":
            value = Constexpr
        elif name[:1].isupper():
            value = type(name, (), {"__module__": self.__name__, "__init__": lambda self, *args, **kwargs: None})
        else:
            value = inert_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Both decorator forms: `@triton.jit` and `@triton.jit(...)` give the undecorated function back."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return _identity

    def __bool__(self) -> bool:
        return False


def _identity(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _cdiv(numerator: int, denominator: int) -> int:
    return -(numerator // -denominator)


def _next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length() if value > 0 else 1


def inert_module(name: str) -> ModuleType:
    """The inert module `name`, made once and registered."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    module = InertModule(name)
    if name == "triton":
        # The two host-side helpers that SGLang really calls.
        module.__dict__.update(cdiv=_cdiv, next_power_of_2=_next_power_of_2)
    sys.modules[name] = module
    return module


class InertTritonLoader(Loader):
    """Import loader of `triton` and everything below it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return inert_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: attributes appear when asked for."""
