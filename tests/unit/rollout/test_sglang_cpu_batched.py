"""The kernels of the CPU support package compute what loops over requests and over experts do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention, silu

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu import experts
from moe_trm_sglang_cpu.decoding import decode, in_lots, plan

EXPERTS, DIM, WIDTH = 6, 8, 5


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """`[H, D]` of one request, as SGLang's loop computes it."""
    out = scaled_dot_product_attention(
        query[:, None], keys.transpose(0, 1), values.transpose(0, 1), scale=scaling, enable_gqa=True
    )
    return out[:, 0]


@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [1, 300, 2, 40, 41, 39, 299, 5], [512, *range(1, 40)]])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 4), (6, 1)])
def test_decoding_all_requests_at_once(lengths: list[int], heads: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    slots = torch.randperm(2048, generator=generator)[: sum(lengths)].split(lengths)
    keys, values = (torch.randn(2048, groups, 16, generator=generator) for _ in range(2))
    # What belongs to nobody must not matter, nor what stands in a row behind its end.
    unused = torch.ones(2048, dtype=torch.bool).index_fill_(0, torch.cat(slots), False)
    keys[unused], values[unused] = float("nan"), float("inf")
    pool_rows = torch.randperm(64, generator=generator)[: len(lengths)]
    slots_of_rows = torch.full((64, 600), int(unused.nonzero()[0]), dtype=torch.int32)
    for row, own in zip(pool_rows.tolist(), slots, strict=True):
        slots_of_rows[row, : len(own)] = own.to(torch.int32)
    query = torch.randn(len(lengths), heads, 16, generator=generator)
    got = decode(query, keys, values, plan(slots_of_rows, pool_rows, torch.tensor(lengths)), 0.3)
    expected = torch.stack([attend(q, keys[own], values[own], 0.3) for q, own in zip(query, slots, strict=True)])
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_no_lot_is_more_than_half_padding() -> None:
    lengths = torch.randint(1, 5000, (200,), generator=torch.Generator().manual_seed(0))
    lots = list(in_lots(lengths))
    assert sorted(torch.cat(lots).tolist()) == list(range(200))
    for lot in lots:
        assert int(lengths[lot].max()) <= 2 * int(lengths[lot].min())


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("one_expert", [False, True])
def test_experts_over_their_own_tokens(tokens: int, one_expert: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, DIM, generator=generator)
    w13 = torch.randn(EXPERTS, 2 * WIDTH, DIM, generator=generator)
    w2 = torch.randn(EXPERTS, DIM, WIDTH, generator=generator)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if one_expert:
        scores[:, 2] = 2.0
    weights, ids = scores.topk(2)

    def one(token: int) -> torch.Tensor:
        total = torch.zeros(DIM)
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = functional.linear(x[token], w13[expert]).chunk(2)
            total += weight * functional.linear(silu(gate) * up, w2[expert])
        return total

    expected = torch.stack([one(token) for token in range(tokens)])
    got = experts.experts(x, weights, w13, w2, ids.to(torch.int32))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_wide_products_of_experts_are_rounded_to_the_dtype_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 64, generator=generator).bfloat16()
    w13 = torch.randn(EXPERTS, 64, 64, generator=generator).mul_(0.2).bfloat16()
    w2 = torch.randn(EXPERTS, 64, 32, generator=generator).mul_(0.2).bfloat16()
    weights, ids = torch.rand(40, EXPERTS, generator=generator).topk(2)
    wide = experts.experts(x, weights, w13, w2, ids)
    monkeypatch.setattr(experts, "SMALL_MATRIX", 1)
    narrow = experts.experts(x, weights, w13, w2, ids)
    assert wide.dtype == narrow.dtype == torch.bfloat16
    torch.testing.assert_close(wide, narrow, atol=2e-2, rtol=2e-2)
    assert (wide == narrow).float().mean() > 0.99


@pytest.mark.parametrize(
    "other", [{}, {"activation": "gelu"}, {"gemm1_alpha": 1.7}, {"apply_router_weight_on_input": True}, {"bias": True}]
)
def test_other_experts_are_left_to_the_loop(other: dict[str, object]) -> None:
    asked = []

    def loop(*arguments: object) -> torch.Tensor:
        asked.append(arguments)
        return torch.zeros(1)

    plain = {"activation": "silu", "gemm1_alpha": None, "apply_router_weight_on_input": False}
    layer = SimpleNamespace(
        num_experts=EXPERTS, w13_weight=torch.ones(EXPERTS, 2 * WIDTH, DIM), w2_weight=torch.ones(EXPERTS, DIM, WIDTH)
    )
    if "bias" in other:
        layer.w13_weight_bias = torch.ones(EXPERTS, 2 * WIDTH)
    chosen = (torch.ones(3, 2), torch.tensor([[0, 1]] * 3), None)
    experts.around(loop, layer, torch.ones(3, DIM), chosen, SimpleNamespace(**{**plain, **other}))
    assert len(asked) == bool(other)
