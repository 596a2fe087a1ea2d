"""A device that computes like the CPU and refuses operands of another device, as CUDA does.

Inside `other_device` tensors on `DEVICE` have values. Operations that mix them with tensors of the CPU raise; numbers
without dimensions, indices and copies may cross, as they may to CUDA.

Process groups are gloo's underneath and refuse there what NCCL refuses: tensors of the CPU, types that it lacks, and
tensors that are not contiguous. Groups that ask for gloo themselves (`new_group(backend="gloo")`) are of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
_OF_HOST: set[str] = set()
"""Names of the groups that asked for gloo."""
_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
"""Collectives of torch that make tensors of their own, on CUDA where the group is NCCL's."""
NCCL_TYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
}
"""Source: torch 2.13, `csrc/distributed/c10d/NCCLUtils.cpp`."""


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
    sends_objects = False

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
    if func.namespace == "c10d":
        _check_collective(func, args, tensors)
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


def _check_collective(func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    if _Dispatch.sends_objects:
        return
    boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
    if boxed is None or dist.ProcessGroup.unbox(boxed).group_name in _OF_HOST:
        return
    for tensor in tensors:
        wrong = {
            "it is on the CPU": not isinstance(tensor, _Elsewhere),
            f"NCCL has no {tensor.dtype}": tensor.dtype not in NCCL_TYPES,
            "it is not contiguous": not tensor.is_contiguous(),
        }
        if any(wrong.values()):
            why = ", ".join(reason for reason, holds in wrong.items() if holds)
            raise RuntimeError(f"{func}: no tensor for NCCL, {tuple(tensor.shape)}: {why}")


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
    """`DEVICE` has values inside, and groups are made for it."""
    make: Any = dist.new_group

    def new_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
        group = make(*args, backend=backend, **options)
        if isinstance(group, dist.ProcessGroup):
            _OF_HOST.update([group.group_name] if backend == "gloo" else [])
            _serve(group)
        return group

    with pytest.MonkeyPatch.context() as patch, _Functions(), _Dispatch():
        patch.setattr(dist, "new_group", new_group)
        for name in _OBJECTS:
            patch.setattr(dist, name, _with_objects(getattr(dist, name)))
        if dist.is_initialized():
            _serve(dist.group.WORLD)
        yield DEVICE


def _with_objects(collective: Any) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Dispatch, "sends_objects", True)
            return collective(*args, **options)

    return run


def _serve(group: Any) -> None:
    """Let sends between pipeline stages, which ask for the backend of a tensor's device, find the CPU's."""
    gloo = group._get_backend(CPU)
    group._register_backend(DEVICE, dist.ProcessGroup.BackendType.GLOO, gloo)


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
