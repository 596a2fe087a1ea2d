"""A device that computes like the CPU and refuses operands of another device, as CUDA does.

Inside `other_device` tensors on `DEVICE` have values. Operations that mix them with tensors of the CPU raise; numbers
without dimensions, indices and copies may cross, as they may to CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
"""torch knows it everywhere; outside of `other_device` its tensors have no values."""
CPU = torch.device("cpu")
_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}
_GET_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_TYPE = Tensor.type
_AS_DATA = {torch.tensor, torch.as_tensor, Tensor.new_tensor}


class _Elsewhere(Tensor):
    """A tensor on `DEVICE`, whose values are those of `host`."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> _Elsewhere:
        made: _Elsewhere = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _computed(func, args, kwargs or {})


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Between tensors and lists, and about `data` and the name of a type, torch asks no subclass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.tolist:
            return func(args[0].cpu())
        if func == _SET_DATA and isinstance(args[0], _Elsewhere):
            args[0].host = args[1].host
            return func(*args)
        if func == _GET_DATA and isinstance(args[0], _Elsewhere):
            return _Elsewhere(args[0].host.data)
        if func is _TYPE and isinstance(args[0], _Elsewhere) and len(args) == 1:
            return func(args[0].host)
        if func in _AS_DATA:
            like = args[0] if func is Tensor.new_tensor else None
            device = torch.device(kwargs.pop("device", None) or (CPU if like is None else like.device))
            if like is not None:
                func, args, kwargs = torch.tensor, args[1:], {"dtype": like.dtype} | kwargs
            return func(*_on_host(args), **kwargs, device=CPU).to(device)
        return func(*args, **kwargs)


def _computed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    indexes = func in _INDEXING and isinstance(args[0], _Elsewhere)
    tensors = [*_tensors((args[0], *args[2:]) if indexes else (*args, *kwargs.values()))]
    here = any(isinstance(tensor, _Elsewhere) for tensor in tensors)
    strange = [tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, _Elsewhere) and tensor.dim()]
    if here and strange and func not in _COPIES:
        raise RuntimeError(f"{func}: expected all tensors on {DEVICE}, but those of {strange} are on the CPU")
    device = kwargs.get("device")
    there = here if device is None else torch.device(device) == DEVICE
    if func is _aten.copy_.default:
        there = isinstance(args[0], _Elsewhere)
    host_kwargs = {name: _on_host(value) for name, value in kwargs.items()}
    if device is not None:
        host_kwargs["device"] = CPU
    host_args = _on_host(args)
    if func is _aten.histc.default:  # CUDA counts integers, a CPU does not
        made = func(host_args[0].double(), *host_args[1:]).to(host_args[0].dtype)
    else:
        made = func(*host_args, **host_kwargs)
    # What an operation changes in place is the tensor that it was given.
    given = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, _Elsewhere)}
    return _wrapped(made, given) if there else made


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _on_host(value: Any) -> Any:
    if isinstance(value, _Elsewhere):
        return value.host
    return type(value)(map(_on_host, value)) if type(value) in (list, tuple) else value


def _wrapped(value: Any, given: Mapping[int, _Elsewhere]) -> Any:
    if isinstance(value, Tensor):
        known = given.get(id(value))
        return _Elsewhere(value) if known is None else known
    return type(value)(_wrapped(each, given) for each in value) if type(value) in (list, tuple) else value


@contextmanager
def other_device() -> Iterator[torch.device]:
    """`DEVICE` has values inside."""
    with _Functions(), _Dispatch():
        yield DEVICE


def move(module: nn.Module) -> nn.Module:
    """`module`, with all parameters and buffers moved onto `DEVICE`; what is shared stays shared."""
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                fresh = nn.Parameter(parameter.detach().to(DEVICE), parameter.requires_grad)
                fresh.__dict__.update(vars(parameter))
                part._parameters[name] = moved.setdefault(id(parameter), fresh)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(DEVICE)
    return module
