"""Everything that can be reached from an object, by path: two learners compared without a list of what they hold."""

from __future__ import annotations

import enum
import hashlib
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

PLAIN = (int, float, complex, str, bytes, bool, type(None), enum.Enum, torch.dtype, torch.device, torch.Size)


def reachable(**roots: Any) -> dict[str, str]:
    """The values of all tensors, arrays, generators and plain values that `roots` lead to, by the first path to each.

    Classes and modules are left out: what they hold is no one object's. Of functions the bound object, the arguments of
    partial ones, and closures count.
    """
    found: dict[str, str] = {}
    seen: dict[int, Any] = {}  # it keeps what it has seen: a number of a lost object may be given again
    waiting = list(roots.items())
    while waiting:
        path, value = waiting.pop(0)
        if isinstance(value, PLAIN):
            found[path] = repr(value)
            continue
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            found[path] = f"{value.dtype} {tuple(value.shape)} {_digest(value)}"
        elif isinstance(value, np.ndarray | np.generic):
            found[path] = f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()[:12]}"
        elif isinstance(value, torch.Generator):
            found[path] = _digest(value.get_state())
        waiting += ((f"{path}{step}", part) for step, part in _parts(value))
    return found


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Paths at which the two differ, with the values of both."""
    return {
        path: (one.get(path), other.get(path))
        for path in sorted(one.keys() | other.keys())
        if one.get(path) != other.get(path)
    }


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, type | types.ModuleType | np.ndarray | np.generic | RemovableHandle):
        return
    if isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    if isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        return
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f".<{name}>", _contents(cell)
        return
    if isinstance(value, Mapping):
        for place, (key, part) in enumerate(value.items()):
            # Numbers are what torch gives to hooks, one after the other in the whole process; their order counts.
            name = _digest(key) if isinstance(key, Tensor) else key
            yield f"[{name if isinstance(name, str) else place}]", part
    elif isinstance(value, Set):
        yield "{}", sorted(map(repr, (each for each in value if isinstance(each, PLAIN))))
    elif isinstance(value, Sequence):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    if isinstance(value, Tensor) and value.grad is not None:
        yield ".grad", value.grad
    for name in [*getattr(value, "__dict__", {}), *_slots(value)]:
        try:
            yield f".{name}", value.__dict__[name] if name in getattr(value, "__dict__", {}) else getattr(value, name)
        except AttributeError:  # a slot without a value
            continue


def _slots(value: Any) -> list[str]:
    declared = [vars(owner).get("__slots__", ()) for owner in type(value).__mro__]
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _digest(tensor: Tensor) -> str:
    own = tensor.detach()
    if own.device.type == "meta":
        return "meta"
    raw = own.cpu().contiguous().reshape(-1).view(torch.uint8) if own.numel() else own.new_zeros(0, dtype=torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:12]
