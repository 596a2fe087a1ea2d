"""State of Megatron's optimizer on the host, saved and taken over, with tensors that only say they are on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

state = pytest.importorskip("moe_trm.learner.megatron.state")
hybrid = pytest.importorskip("megatron.core.optimizer.cpu_offloading")
distributed = pytest.importorskip("megatron.core.optimizer.distrib_optimizer")


class Stream:
    """Does everything at once."""

    def wait_stream(self, _stream: Any) -> None: ...

    def wait(self, _stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> Stream:
        return self


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    is_there = property(lambda tensor: getattr(tensor, "on_device", False))
    monkeypatch.setattr(torch.Tensor, "is_cuda", is_there, raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)


def part_of(weights: list[Tensor], groups: int) -> Any:
    """A distributed optimizer over these weights, as far as its state goes."""
    for tensor in weights:
        tensor.on_device = True  # type: ignore[attr-defined]
    part = distributed.DistributedOptimizer.__new__(distributed.DistributedOptimizer)
    part.optimizer = hybrid.HybridDeviceOptimizer(
        [{"params": weights[start::groups], "lr": 0.1 * (start + 1)} for start in range(groups)],
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        pin_cpu_grads=False,
        pin_cpu_params=False,
        betas=(0.9, 0.95),
        fused=True,
    )
    part.is_stub_optimizer = False
    part.model_param_group_index_map = {
        tensor: (number % groups, number // groups) for number, tensor in enumerate(weights)
    }
    part._get_model_param_range_map = lambda _parameter: {"param": SimpleNamespace(start=0)}
    return part


def step(part: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in part.model_param_group_index_map:
        parameter.decoupled_grad = torch.randn(parameter.shape, generator=generator)
    part.optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_offloaded_optimizer_goes_on_with_the_same_bits(dtype: torch.dtype) -> None:
    """Master weights and moments are found on the host, one optimizer for each tensor, and put back there."""
    start = [torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype) for size in (3, 5, 7)]
    first = part_of([tensor.clone() for tensor in start], groups=2)
    for seed in range(3):
        step(first, seed)
    saved = list(state._masters_of(first))
    assert all(master.values.dtype == torch.float32 and not master.values.is_cuda for _, master in saved)
    assert all(torch.equal(parameter, master.values.to(dtype)) for parameter, master in saved)
    assert not torch.equal(saved[0][0], start[0])

    second = part_of([tensor.clone() for tensor in start], groups=2)
    for (parameter, master), (other, before) in zip(state._masters_of(second), saved, strict=True):
        moments = {kind: before.optimizer.state[before.values][kind].clone() for kind in state.MOMENTS}
        parameter.copy_(other)
        master.values.copy_(before.values)
        master.set_moments(moments, steps=3)
        assert master.listed is parameter
    for part in (first, second):
        step(part, 3)
    for (parameter, master), (other, before) in zip(state._masters_of(second), state._masters_of(first), strict=True):
        assert torch.equal(parameter, other)
        assert torch.equal(master.values, before.values)
