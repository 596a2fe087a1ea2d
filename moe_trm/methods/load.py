"""Find a function by the name a configuration gives it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_trm.errors import ConfigError


def load_function(name: str, *, key: str) -> Callable[..., Any]:
    """The function called `package.module:function` or `path/to/file.py:function`.

    Modules are also looked for in the working directory, and by a file in its own folder too, but after all that is
    installed: no file there stands in for another module.
    Raises `ConfigError`, naming the configuration's `key`, for no such module, file or function, or a failing import.
    """
    place, _, attribute = name.rpartition(":")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _by_name(place)
        function = getattr(module, attribute)
    except ConfigError:
        raise
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


def place_of(function: Callable[..., Any]) -> str:
    """File and line where `function` is defined, as `FILE:LINE`; its name where it has no code in Python."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def place_in(error: BaseException, function: Callable[..., Any]) -> str:
    """Line of `function`'s file that raised `error`, or else the last line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    file_name = place_of(function).rpartition(":")[0]
    frame = next((frame for frame in reversed(frames) if frame.filename == file_name), frames[-1] if frames else None)
    return f"{frame.filename}:{frame.lineno}" if frame is not None else place_of(function)


def _by_name(name: str) -> ModuleType:
    _search_last(Path.cwd())
    return importlib.import_module(name)


def _search_last(folder: Path) -> None:
    """Modules are looked for in `folder` too, after all other places."""
    if not {str(folder), "" if folder == Path.cwd() else str(folder)} & {*sys.path}:
        sys.path.append(str(folder))


def _from_file(path: Path) -> ModuleType:
    """The module in `path`, executed once. It is called after its file unless another module has that name."""
    resolved = path.resolve()
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(resolved):
            return loaded
        name = str(resolved)
        if name in sys.modules:
            return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(path)
    _search_last(resolved.parent)
    _search_last(Path.cwd())
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and annotations look their own module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
