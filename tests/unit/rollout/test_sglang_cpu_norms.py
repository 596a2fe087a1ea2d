"""Norms and rotations of the CPU support package: bit for bit those of SGLang's native path."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.norms import norm_and_rotate, wrap

EPS = 1e-6


def native_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As SGLang's `RMSNorm.forward_native` computes it."""
    dtype, x = x.dtype, x.contiguous().to(torch.float32)
    if residual is not None:
        x = x + residual.to(torch.float32)
    variance = x.pow(2).mean(dim=-1, keepdim=True)
    return (x * torch.rsqrt(variance + EPS) * weight).to(dtype), x.to(dtype)


def native_rotation(x_NHD: Tensor, cos_sin: Tensor, rotary_dim: int, is_neox: bool) -> Tensor:
    """As SGLang's `RotaryEmbedding.forward_native` computes it."""
    cos, sin = (half.unsqueeze(-2).to(x_NHD.dtype) for half in cos_sin.chunk(2, dim=-1))
    turning, rest = x_NHD[..., :rotary_dim], x_NHD[..., rotary_dim:]
    x1, x2 = turning.chunk(2, dim=-1) if is_neox else (turning[..., ::2], turning[..., 1::2])
    o1, o2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    turned = torch.cat((o1, o2), dim=-1) if is_neox else torch.stack((o1, o2), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)


def norm(width: int, weight: Tensor, **other: object) -> SimpleNamespace:
    plain = {
        "cast_x_before_out_mul": False,
        "fp32_residual": False,
        "override_orig_dtype": None,
        "variance_size_override": None,
    }
    return SimpleNamespace(**{**plain, **other}, hidden_size=width, weight=weight, variance_epsilon=EPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("width", [32, 128, 200])
def test_norms_are_sglangs_bit_for_bit(dtype: torch.dtype, cut: bool, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    wide = torch.randn(37, 2 * width, generator=generator).to(dtype)
    x = wide[:, :width] if cut else wide[:, :width].contiguous()
    weight = torch.randn(width, generator=generator).to(dtype)
    residual = torch.randn(37, width, generator=generator).to(dtype)
    kept = x.clone(), residual.clone()
    forward = wrap(lambda *_: pytest.fail("a plain norm was left to SGLang"))
    assert torch.equal(forward(norm(width, weight), x), native_norm(x, weight)[0])
    got, expected = forward(norm(width, weight), x, residual), native_norm(x, weight, residual)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    for one, other in zip((x, residual), kept, strict=True):
        assert torch.equal(one, other), "the inputs are as they were"


@pytest.mark.parametrize(
    "other",
    [
        {"cast_x_before_out_mul": True},
        {"fp32_residual": True},
        {"override_orig_dtype": torch.float32},
        {"variance_size_override": 2},
    ],
)
def test_other_norms_are_left_to_sglang(other: dict[str, object]) -> None:
    forward = wrap(lambda *arguments: arguments)
    x, special = torch.ones(1, 4), norm(4, torch.ones(4), **other)
    assert forward(special, x, x) == (special, x, x, None, None)
    assert forward(norm(4, torch.ones(4)), x, x, x)[3] is x


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_queries_and_keys_are_normed_and_rotated_in_place(
    is_neox: bool, rotary_dim: int, apart: bool, dtype: torch.dtype
) -> None:
    heads, groups, dim, tokens = 6, 2, 16, 29
    generator = torch.Generator().manual_seed(rotary_dim)
    qkv = torch.randn(tokens, (heads + 2 * groups) * dim, generator=generator).to(dtype)
    before = qkv.clone()
    q, k, v = qkv.split([heads * dim, groups * dim, groups * dim], dim=-1)
    if apart:
        k = k.clone()
    q_weight, k_weight = (torch.randn(dim, generator=generator).to(dtype) for _ in range(2))
    positions = torch.randint(0, 64, (tokens,), generator=generator)
    angles = torch.rand(64, rotary_dim // 2, generator=generator)
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    norm_and_rotate(q, k, q_weight, k_weight, EPS, is_neox, positions, cache, rotary_dim)
    old = before.split([heads * dim, groups * dim, groups * dim], dim=-1)
    for new, was, weight in ((q, old[0], q_weight), (k, old[1], k_weight)):
        by_head = native_norm(was.reshape(-1, dim), weight)[0].view(tokens, -1, dim)
        expected = native_rotation(by_head, cache[positions], rotary_dim, is_neox)
        assert torch.equal(new.reshape(tokens, -1, dim), expected)
    assert torch.equal(v, old[2]), "values are as they were"


def test_another_table_of_angles_is_read_anew() -> None:
    """The signed table of one model is kept; another model's, or a longer one, has its own."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    ones, found = torch.ones(4), []
    for angle in (0.0, 1.0):
        qk = x.clone()
        cache = torch.tensor([[angle, angle]]).repeat(5, 1)
        table = torch.cat([cache.cos(), cache.sin()], -1)
        norm_and_rotate(qk[:, :4], qk[:, 4:], ones, ones, EPS, True, torch.arange(3), table, 4)
        found.append(qk)
    assert not torch.equal(*found)
