"""Find a function by the name a configuration gives it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_trm.errors import ConfigError


def load_function(name: str, *, key: str) -> Callable[..., Any]:
    """The function called `package.module:function` or `path/to/file.py:function`.

    Modules are looked for in the working directory first, as `python -m` does; a file's own folder is importable to it.
    As with any import, a file is run once in a process.

    Args:
        name: as in the configuration.
        key: the configuration key, for the text of an error.

    Raises:
        ConfigError: no such module, file or function, or one whose import fails.
    """
    place, _, attribute = name.rpartition(":")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _by_name(place)
        function = getattr(module, attribute)
    except Exception as error:
        raise ConfigError(
            "the function cannot be loaded",
            where=f"config key {key}",
            got=f"{name} ({type(error).__name__}: {error})",
            expected="package.module:function or path/to/file.py:function",
            fix=f"run `python -c 'import {Path(place).stem}'` where you start the run",
        ) from error
    if not callable(function):
        raise ConfigError(
            "this is not a function",
            where=f"config key {key}",
            got=f"{name} is a {type(function).__name__}",
            expected="a function",
        )
    return function  # type: ignore[no-any-return]


def _by_name(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(path)
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == spec.origin:
        return loaded
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and annotations look their own module up.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module
