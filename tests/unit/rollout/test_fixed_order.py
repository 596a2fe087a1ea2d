"""Sums in a fixed order: what a row becomes does not depend on the rows beside it, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

fixed_order = pytest.importorskip("moe_trm_sglang_cpu.fixed_order", reason="CPU support is installed without CUDA only")

COUNTS = (1, 2, 5, 31, 33, 100)


@pytest.fixture
def fixed() -> Iterator[None]:
    with fixed_order.fixed_order():
        yield


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def depends_on_others(compute: Callable[[Tensor], Tensor], inputs: Tensor) -> bool:
    """True where the first rows alone, or one row alone, come out otherwise than among all."""
    whole = compute(inputs)
    parts = [slice(0, count) for count in COUNTS] + [slice(place, place + 1) for place in (7, len(inputs) - 1)]
    return not all(torch.equal(compute(inputs[part].clone()), whole[part]) for part in parts)


WEIGHT, BIAS = rows(96, 256), rows(96)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, WEIGHT),
    "linear with a bias": lambda x: F.linear(x, WEIGHT, BIAS),
    "product into": lambda x: torch.mm(x, WEIGHT.T, out=torch.empty(len(x), 96)),
    "three dimensions": lambda x: F.linear(x[:, None], WEIGHT)[:, 0],
    "batches": lambda x: torch.bmm(x.view(1, -1, 256), WEIGHT.T[None])[0],
    "sigmoid": lambda x: x[:, :3].sigmoid(),
    "silu": lambda x: F.silu(x[:, :7]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("fixed")
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    assert not depends_on_others(FUNCTIONS[name], rows(120, 256))


def test_torchs_own_products_depend_on_them_and_are_back_afterwards() -> None:
    with fixed_order.fixed_order():
        fixed = F.linear(rows(2, 256), WEIGHT)
    assert depends_on_others(FUNCTIONS["linear"], rows(120, 256))
    torch.testing.assert_close(F.linear(rows(2, 256), WEIGHT), fixed, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fixed")
def test_other_dtypes_and_empty_products_are_torchs_own() -> None:
    for inputs in (rows(3, 256).double(), torch.empty(0, 256)):
        expected = (inputs[:, None, :] * WEIGHT.to(inputs.dtype)).sum(-1)
        torch.testing.assert_close(F.linear(inputs, WEIGHT.to(inputs.dtype)), expected)


def attention(query: Tensor, key: Tensor, value: Tensor, before: int = 0) -> Tensor:
    places = torch.arange(key.shape[1])
    hidden = places > before + torch.arange(query.shape[1])[:, None]
    found: Tensor = fixed_order.attend(query, key, value, hidden.expand(len(query), -1, -1), 0.2)
    return found


def torchs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.2, enable_gqa=True)
    return found.transpose(1, 2)


@pytest.mark.usefixtures("fixed")
def test_attention_in_decoding_is_that_of_the_whole_text() -> None:
    query, key, value = rows(2, 150, 4, 32), rows(2, 150, 2, 32) * 2, rows(2, 150, 2, 32) + 1
    whole = attention(query, key, value)
    torch.testing.assert_close(whole, torchs(query, key, value), rtol=1e-5, atol=1e-6)
    for place in (0, 1, 63, 64, 100, 149):
        one = attention(query[:, place : place + 1], key[:, : place + 1], value[:, : place + 1], place)
        assert torch.equal(one, whole[:, place : place + 1]), place
    assert torch.equal(attention(query[1:, 70:], key[1:], value[1:], 70), whole[1:, 70:]), "behind a cached prefix"


@pytest.mark.usefixtures("fixed")
def test_gradients_are_those_of_torchs_attention() -> None:
    def gradients(compute: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = [rows(1, 70, heads, 32).requires_grad_() for heads in (4, 2, 2)]
        return torch.autograd.grad(compute(*inputs).square().sum(), inputs)

    torch.testing.assert_close(gradients(attention), gradients(torchs), rtol=1e-4, atol=1e-5)
