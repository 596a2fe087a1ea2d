"""Fake quantisation: by hand, against a loop, its properties, and which tensors it rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_trm.methods.weight_formats import LARGEST, WeightFormat
from moe_trm.sync.rounding import Rounding, fake_quantize, is_matrix

FORMATS: tuple[WeightFormat, ...] = ("fp8_e4m3", "int8", "int4")
E4M3 = sorted(
    {
        sign * (1 + m / 8) * 2.0 ** (e - 7)
        for sign in (-1, 1)
        for e in range(1, 16)
        for m in range(8)
        if (e, m) != (15, 7)
    }
    | {sign * m / 8 * 2.0**-6 for sign in (-1, 1) for m in range(8)}
)
"""Every finite number of the format, from its definition."""
GRIDS: dict[str, list[float]] = {"fp8_e4m3": E4M3, "int8": list(range(-127, 128)), "int4": list(range(-7, 8))}


def weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nearest(value: float, scale: float, grid: list[float]) -> set[float]:
    """Both neighbours at a tie."""
    best = min(abs(value / scale - point) for point in grid)
    return {point * scale for point in grid if abs(value / scale - point) <= best * (1 + 1e-5) + 1e-7}


def test_by_hand() -> None:
    weight = torch.tensor([[7.0, 3.4, -0.4, 0.6], [0.0, 0.0, 0.0, 0.0], [0.07, -0.034, 0.011, 0.0]])
    expected = torch.tensor([[7.0, 3.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.07, -0.03, 0.01, 0.0]])
    assert torch.allclose(fake_quantize(weight, "int4"), expected, atol=1e-7)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("block", [None, 2, 3])
def test_agrees_with_a_loop(to: WeightFormat, block: int | None) -> None:
    weight = weights(5, 7)
    found = fake_quantize(weight, to, block)
    for row in range(5):
        for column in range(7):
            group = (
                weight[row]
                if block is None
                else weight[
                    row // block * block : (row // block + 1) * block,
                    column // block * block : (column // block + 1) * block,
                ]
            )
            scale = float(group.abs().max()) / LARGEST[to]
            near = nearest(float(weight[row, column]), scale, GRIDS[to])
            assert min(abs(float(found[row, column]) - value) for value in near) < 1e-6


@given(st.sampled_from(FORMATS), st.sampled_from([None, 4]), st.integers(0, 1000), st.floats(1e-6, 1e4))
def test_rounding_twice_is_rounding_once_and_scales_pass_through(
    to: WeightFormat, block: int | None, seed: int, factor: float
) -> None:
    weight = weights(6, 10, seed=seed)
    once = fake_quantize(weight, to, block)
    assert torch.allclose(fake_quantize(once, to, block), once, rtol=1e-5, atol=1e-7)
    assert torch.allclose(fake_quantize(weight * factor, to, block), once * factor, rtol=1e-4, atol=factor * 1e-5) or (
        # A weight between two grid points may go either way once its ratio to the scale is rounded.
        (fake_quantize(weight * factor, to, block) / factor - once).abs().gt(1e-4).float().mean() < 0.05
    )


@pytest.mark.parametrize("to", FORMATS)
def test_stacked_experts_are_rounded_one_by_one_in_either_order(to: WeightFormat) -> None:
    stacked = weights(3, 6, 10)
    apart = torch.stack([fake_quantize(expert, to) for expert in stacked])
    assert torch.equal(fake_quantize(stacked, to), apart)
    name, rounding = "model.layers.0.mlp.experts.gate_up_proj", Rounding("float32", to)
    assert torch.equal(rounding.pushed(name, stacked.mT), apart.mT)
    assert torch.equal(rounding.held(name, stacked.mT, inputs_first=True), apart.mT)
    assert torch.equal(rounding.held(name, stacked), apart)


def test_coarser_formats_round_more_and_blocks_of_one_row_are_finer_than_a_channel() -> None:
    weight = weights(32, 256) * torch.logspace(-2, 0, 256)
    errors = [float((fake_quantize(weight, to) - weight).square().mean()) for to in ("int8", "int4")]
    assert errors[0] * 50 < errors[1]
    assert float((fake_quantize(weight, "int4", 8) - weight).square().mean()) < errors[1] / 2


@pytest.mark.parametrize(
    ("name", "rounded"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.layers.0.mlp.experts.3.down_proj.weight", True),
        ("model.layers.0.block_sparse_moe.experts.3.w2.weight", True),
        ("decoder.layers.0.self_attention.linear_qkv.weight", True),
        ("decoder.layers.0.self_attention.linear_kv_up_proj.weight", True),
        ("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", True),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight7", True),
        ("model.layers.0.mlp.gate.weight", False),
        ("decoder.layers.0.mlp.router.weight", False),
        ("model.embed_tokens.weight", False),
        ("embedding.word_embeddings.weight", False),
        ("lm_head.weight", False),
        ("output_layer.weight", False),
    ],
)
def test_matrices_are_rounded_and_what_published_checkpoints_keep_is_kept(name: str, rounded: bool) -> None:
    weight = weights(4, 6)
    assert is_matrix(name, weight) == rounded
    assert torch.equal(Rounding("float32", "int4").pushed(name, weight), weight) != rounded
    assert torch.equal(Rounding("float32").pushed(name, weight), weight)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.experts.gate_up_proj_bias"]
)
def test_biases_are_cast_alone(name: str) -> None:
    bias = weights(3, 5)
    assert torch.equal(Rounding("bfloat16", "int4").pushed(name, bias), bias.bfloat16())


def test_biases_that_choose_experts_stay_float32() -> None:
    bias, rounding = "model.layers.3.mlp.gate.e_score_correction_bias", Rounding("bfloat16", "int8")
    assert rounding.dtype_of(bias) == "float32"
    assert torch.equal(rounding.pushed(bias, weights(8)), weights(8))
    assert rounding.dtype_of("model.layers.3.mlp.gate.weight") == "bfloat16"


def test_quantised_then_cast() -> None:
    weight = weights(8, 16)
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(Rounding("bfloat16", "int8").pushed(name, weight), fake_quantize(weight, "int8").bfloat16())
