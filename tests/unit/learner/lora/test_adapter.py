"""Merged weights and their gradients against float64, the start of factors, and what modules see while they run."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_trm.learner.lora.adapter import Adapter, AdapterStart, Factors, factor_name, merge_in_passes, merged

MODULE = "model.layers.0.self_attn.q_proj"
SCALE = 2.0


def factors(outputs: int, inputs: int, rank: int, dtype: torch.dtype, *experts: int) -> Factors:
    generator = torch.Generator().manual_seed(outputs * inputs)
    shapes = ((*experts, rank, inputs), (*experts, outputs, rank))
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return Factors(a, b)


def stack(matrices: list[Tensor]) -> Tensor:
    return torch.cat(matrices, dim=-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("experts", [(), (3,)])
def test_the_sum_is_rounded_once(dtype: torch.dtype, experts: tuple[int, ...]) -> None:
    """Two matrices in one parameter, and a third between them that has no adapter."""
    first, last = factors(4, 6, 2, dtype, *experts), factors(5, 6, 2, dtype, *experts)
    base = torch.randn((*experts, 12, 6), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    adapter = Adapter([first, (*experts, 3, 6), last], SCALE, lambda each: stack(list(each)))
    exact = base.double().clone()
    exact[..., :4, :] += SCALE * (first.B.double() @ first.A.double())
    exact[..., 7:, :] += SCALE * (last.B.double() @ last.A.double())
    found, exact = adapter(base).detach(), exact.detach()
    assert found.dtype is dtype
    if dtype in (torch.bfloat16, torch.float16):
        # At most one step of the dtype away where the float32 sum lies between two values.
        assert torch.equal(found[..., 4:7, :], base[..., 4:7, :])
        assert float((found.double() - exact.to(dtype).double()).abs().max()) <= 2**-7 * float(exact.abs().max())
        assert float((found == exact.to(dtype)).double().mean()) > 0.99
    else:
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(adapter.value(base), found)


def test_gradients_are_those_of_low_rank_adapters() -> None:
    """dA = s B' dW and dB = s dW A', in float64, which are the gradients of x W' + s x A' B'."""
    pair = factors(4, 6, 2, torch.float64)
    base = torch.randn(4, 6, dtype=torch.float64)
    adapter = Adapter([pair], SCALE, lambda each: each[0])
    inputs = torch.randn(9, 6, dtype=torch.float64)
    (inputs @ adapter(base).T).sin().sum().backward()
    found = [pair.A.grad, pair.B.grad]
    pair.zero_grad()
    beside = inputs @ base.T + SCALE * (inputs @ pair.A.T) @ pair.B.T
    beside.sin().sum().backward()
    for got, expected in zip(found, (pair.A.grad, pair.B.grad), strict=True):
        assert got is not None
        assert expected is not None
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_new_adapter_changes_no_bit(dtype: torch.dtype) -> None:
    base = torch.randn(8, 16).to(dtype)
    a, b = AdapterStart(4, seed=3).factors(MODULE, 8, 16)
    found = Adapter([Factors(a.to(dtype), b.to(dtype))], SCALE, lambda each: each[0])(base)
    assert torch.equal(found.view(torch.uint8), base.view(torch.uint8))


def test_factors_start_alike_on_every_layout_and_differ_between_matrices_and_seeds() -> None:
    start = AdapterStart(4, seed=3)
    a, b = start.factors(MODULE, 8, 16)
    assert torch.equal(a, AdapterStart(4, seed=3).factors(MODULE, 8, 16)[0])
    assert not torch.equal(a, start.factors(MODULE.replace("q_", "k_"), 8, 16)[0])
    assert not torch.equal(a, AdapterStart(4, seed=4).factors(MODULE, 8, 16)[0])
    assert (a.shape, b.shape) == ((4, 16), (8, 4))
    assert not b.any()
    assert 0.5 / math.sqrt(16) < float(a.abs().max()) <= 1 / math.sqrt(16)
    given = {factor_name(MODULE, name): torch.ones(2, 2, dtype=torch.bfloat16) for name in ("lora_A", "lora_B")}
    assert [each.dtype for each in AdapterStart(2, 0, given).factors(MODULE, 2, 2)] == [torch.float32] * 2


class Layer(nn.Module):
    """A matrix that is read twice, as an expert's stack is."""

    def __init__(self, base: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(base, requires_grad=False)
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor, *, fail: bool = False) -> Tensor:
        self.seen.append(self.weight)
        if fail:
            raise ValueError("broken")
        return inputs @ self.weight.T + inputs @ self.weight.T


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_module_sees_the_merged_weight_while_it_runs(*, recomputes: bool) -> None:
    pair, base = factors(4, 6, 2, torch.float64), torch.randn(4, 6, dtype=torch.float64)
    layer, adapter = Layer(base.clone()), Adapter([pair], SCALE, lambda each: each[0])
    layer.add_module("lora_weight", adapter)
    read_by_hooks: list[Tensor] = []
    layer.register_forward_hook(lambda module, _args, _out: read_by_hooks.append(module.weight))
    merge_in_passes([(layer, "weight", adapter)])
    inputs = torch.randn(5, 6, dtype=torch.float64)
    run = partial(checkpoint, layer, use_reentrant=False) if recomputes else layer
    run(inputs).sum().backward()
    assert all(torch.equal(each, merged(base, pair.B @ pair.A, SCALE)) for each in layer.seen + read_by_hooks)
    assert len(layer.seen) == 1 + recomputes
    assert isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight, base)
    assert layer.weight.grad is None
    assert pair.A.grad is not None
    assert pair.A.grad.any()
    assert [name for name, each in layer.named_parameters() if not each.requires_grad] == ["weight"]


def test_a_pass_that_fails_leaves_the_weight_as_it_was() -> None:
    pair, base = factors(4, 6, 2, torch.float64), torch.randn(4, 6, dtype=torch.float64)
    layer = Layer(base.clone())
    merge_in_passes([(layer, "weight", Adapter([pair], SCALE, lambda each: each[0]))])
    with pytest.raises(ValueError, match="broken"):
        layer(torch.randn(5, 6, dtype=torch.float64), fail=True)
    assert torch.equal(layer.weight, base)
    assert "weight" not in layer.__dict__


def test_a_pass_without_gradients_sees_a_weight_that_trains_as_an_update_does() -> None:
    """Megatron-Core's layers choose their product by that, and two products differ in the last bit."""
    pair, base = factors(4, 6, 2, torch.float64), torch.randn(4, 6, dtype=torch.float64)
    layer = Layer(base.clone())
    merge_in_passes([(layer, "weight", Adapter([pair], SCALE, lambda each: each[0]))])
    inputs = torch.randn(5, 6, dtype=torch.float64)
    with torch.no_grad():
        scored = layer(inputs)
    updated = layer(inputs)
    assert [each.requires_grad for each in layer.seen] == [True, True]
    assert [each.is_leaf for each in layer.seen] == [True, False]
    assert not scored.requires_grad
    assert updated.requires_grad
