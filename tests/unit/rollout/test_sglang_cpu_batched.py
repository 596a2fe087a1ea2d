"""The batched parts of the CPU support package compute what loops over requests and over experts do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu import batched_experts, prefill
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


def attend_from(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, first: int
) -> torch.Tensor:
    """`[T, H, D]` of the last tokens of one request, as SGLang's loop computes them: with queries before `first`."""
    padded = torch.zeros(len(keys), *query.shape[1:])
    padded[first:] = query
    out = scaled_dot_product_attention(
        padded.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), scale=scaling, enable_gqa=True,
        is_causal=True,
    )  # fmt: skip
    return out.transpose(0, 1)[first:]


@pytest.mark.parametrize(
    ("lengths", "new"),
    [
        ([1], [1]),
        ([7, 7, 7], [7, 1, 4]),
        ([1, 300, 2, 40, 41, 39, 299, 5], [1, 2, 2, 40, 1, 20, 299, 3]),
        ([64] * 30, [*range(1, 31)]),
    ],
)
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 4), (6, 1)])
def test_prefill_of_all_requests_at_once(lengths: list[int], new: list[int], heads: int, groups: int) -> None:
    """With and without a cached prefix, of like and of very unlike lengths."""
    generator = torch.Generator().manual_seed(sum(new))
    slots = torch.randperm(2048, generator=generator)[: sum(lengths)].split(lengths)
    keys, values = torch.randn(2048, groups, 16, generator=generator), torch.randn(2048, groups, 8, generator=generator)
    unused = torch.ones(2048, dtype=torch.bool).index_fill_(0, torch.cat(slots), False)
    keys[unused], values[unused] = float("nan"), float("inf")
    pool_rows = torch.randperm(64, generator=generator)[: len(lengths)]
    slots_of_rows = torch.full((64, 600), int(unused.nonzero()[0]), dtype=torch.int32)
    for row, own in zip(pool_rows.tolist(), slots, strict=True):
        slots_of_rows[row, : len(own)] = own.to(torch.int32)
    query = torch.randn(sum(new), heads, 16, generator=generator)
    lots = prefill.plan(slots_of_rows, pool_rows, torch.tensor(lengths), torch.tensor(new))
    got = prefill.prefill(query, keys, values, lots, 0.3)
    expected = torch.cat(
        [
            attend_from(q, keys[own], values[own], 0.3, length - count)
            for q, own, length, count in zip(query.split(new), slots, lengths, new, strict=True)
        ]
    )
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_long_prefills_are_left_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, rows = torch.zeros(4, 100, dtype=torch.int32), torch.arange(2)
    lengths = torch.tensor([50, 60])
    assert prefill.plan(slots, rows, lengths, lengths)
    monkeypatch.setattr(prefill, "MOST_PAIRS", 50 * 60)
    assert not prefill.plan(slots, rows, lengths, lengths)


def test_no_lot_is_more_than_half_padding() -> None:
    lengths = torch.randint(1, 5000, (200,), generator=torch.Generator().manual_seed(0))
    lots = list(in_lots(lengths))
    assert sorted(torch.cat(lots).tolist()) == list(range(200))
    for lot in lots:
        assert int(lengths[lot].max()) <= 2 * int(lengths[lot].min())


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("one_expert", [False, True])
def test_experts_in_two_products(tokens: int, one_expert: bool) -> None:
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
            gate, up = linear(x[token], w13[expert]).chunk(2)
            total += weight * linear(silu(gate) * up, w2[expert])
        return total

    found, capacity = batched_experts.places(ids, EXPERTS)
    assert len(set(found.tolist())) == ids.numel()
    assert torch.equal(found.view_as(ids) // capacity, ids)
    expected = torch.stack([one(token) for token in range(tokens)])
    got = batched_experts.batched(x, weights, w13, w2, found, capacity)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    got = batched_experts.one_by_one(x, weights, w13, w2, ids.to(torch.int32))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("few", "small"), [(1, 1 << 18), (100, 1), (100, 1 << 18)])
def test_products_by_expert_round_as_the_batched_ones(few: int, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_experts, "FEW_ROWS", few)
    monkeypatch.setattr(batched_experts, "SMALL_MATRIX", small)
    generator = torch.Generator().manual_seed(few)
    x = torch.randn(40, 64, generator=generator).bfloat16()
    w13 = torch.randn(EXPERTS, 64, 64, generator=generator).mul_(0.2).bfloat16()
    w2 = torch.randn(EXPERTS, 64, 32, generator=generator).mul_(0.2).bfloat16()
    weights, ids = torch.rand(40, EXPERTS, generator=generator).topk(2)
    got = batched_experts.one_by_one(x, weights, w13, w2, ids)
    assert got.dtype == torch.bfloat16
    expected = batched_experts.batched(x, weights, w13, w2, *batched_experts.places(ids, EXPERTS))
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
    assert (got == expected).float().mean() > 0.99


@pytest.mark.parametrize(("tokens", "crowded"), [(12, False), (12, True), (1, False), (200, False)])
def test_crowded_experts_are_computed_one_by_one(tokens: int, crowded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_experts, "MOST_PLACES", 11)
    asked = []
    for name in ("batched", "one_by_one"):
        monkeypatch.setattr(batched_experts, name, lambda *_arguments, name=name: asked.append(name))
    plain = SimpleNamespace(activation="silu", gemm1_alpha=None, apply_router_weight_on_input=False)
    layer = SimpleNamespace(num_experts=EXPERTS, w13_weight=None, w2_weight=None)
    ids = torch.arange(2 * tokens).view(tokens, 2) % EXPERTS
    if crowded:
        ids[:, 0] = 3
    chosen = (torch.ones(tokens, 2), ids, None)
    batched_experts.around(lambda *_arguments: torch.zeros(1), layer, torch.ones(tokens, DIM), chosen, plain)
    assert asked == ["one_by_one" if crowded or tokens == 200 else "batched"]


@pytest.mark.parametrize(
    "other", [{"activation": "gelu"}, {"gemm1_alpha": 1.7}, {"apply_router_weight_on_input": True}]
)
def test_other_experts_are_left_to_the_loop(other: dict[str, object]) -> None:
    asked = []

    def loop(*arguments: object) -> torch.Tensor:
        asked.append(arguments)
        return torch.zeros(1)

    plain = {"activation": "silu", "gemm1_alpha": None, "apply_router_weight_on_input": False}
    layer = SimpleNamespace(num_experts=EXPERTS, w13_weight=torch.ones(EXPERTS, 4, DIM), w2_weight=None)
    chosen = (torch.ones(3, 2), torch.tensor([[0, 1]] * 3), None)
    batched_experts.around(loop, layer, torch.ones(3, DIM), chosen, SimpleNamespace(**{**plain, **other}))
    assert len(asked) == 1
