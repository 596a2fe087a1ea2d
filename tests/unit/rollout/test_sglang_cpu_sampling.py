"""Sampling of the CPU support package: SGLang's order and support bit for bit, and tokens by their weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.sampling import drawn, in_order, wrap

ROWS, VOCAB = 60, 50


def native(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and tokens as SGLang's `top_k_top_p_min_p_sampling_from_probs_torch` leaves them."""
    weights, ids = probs.sort(dim=-1, descending=True, stable=True)
    sums = torch.cumsum(weights, dim=-1)
    weights[torch.arange(VOCAB).view(1, -1) >= top_ks.view(-1, 1)] = 0.0
    weights[(sums - weights) > top_ps.view(-1, 1)] = 0.0
    return weights, ids.to(torch.int32)


def some_probs(seed: int = 0) -> Tensor:
    """Flat and sharp rows, zeros and equal ones among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, VOCAB, generator=generator) * torch.arange(1, ROWS + 1)[:, None] / 4
    logits[3] = 0.0
    logits[4, 10:30] = logits[4, 0]
    logits[5, ::2] = float("-inf")
    return logits.softmax(-1)


def asked(
    probs: Tensor, min_p: bool = False, seeds: Tensor | None = None, filtered: bool = True, most: int | None = None
) -> object:
    top_ks, top_ps = torch.arange(ROWS) % VOCAB + 1, torch.linspace(0.05, 1.0, ROWS)
    sample = wrap(lambda *_, **__: "SGLang's own")
    rest = (torch.zeros(ROWS), min_p, seeds, torch.arange(ROWS))
    return sample(probs, top_ks, top_ps, *rest, return_filtered_probs=filtered, max_top_k=most)


def test_the_order_is_that_of_a_stable_sort() -> None:
    probs, ids = in_order(some_probs())
    expected, places = some_probs().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(probs, expected)
    assert torch.equal(ids, places.to(torch.int32))


def test_support_and_order_are_sglangs_bit_for_bit() -> None:
    probs = some_probs(1)
    found = asked(probs.clone())
    assert isinstance(found, tuple)
    tokens, weights, ids, chosen = found
    expected, places = native(probs, torch.arange(ROWS) % VOCAB + 1, torch.linspace(0.05, 1.0, ROWS))
    assert torch.equal(weights, expected)
    assert torch.equal(ids, places)
    assert bool((chosen > 0).all())
    place = (ids == tokens[:, None]).int().argmax(-1)
    assert torch.equal(weights.gather(1, place[:, None]).view(-1), chosen)


@pytest.mark.parametrize("most", [None, VOCAB])
def test_tokens_are_the_same_whether_their_support_is_recorded_or_not(most: int | None) -> None:
    """Costs of masks are found by switching them off, and the sampling itself must not change with them."""
    found = []
    for filtered in (True, False):
        torch.manual_seed(7)
        found.append(asked(some_probs(2), filtered=filtered, most=most))
    recorded, alone = found
    assert isinstance(recorded, tuple)
    assert isinstance(alone, Tensor)
    assert torch.equal(recorded[0], alone)


def test_unusual_batches_are_left_to_sglang() -> None:
    probs = some_probs()
    assert asked(probs, min_p=True) == "SGLang's own"
    assert asked(probs, seeds=torch.arange(ROWS)) == "SGLang's own"
    assert asked(probs, filtered=False, most=VOCAB - 1) == "SGLang's own"
    assert asked(probs.double()) == "SGLang's own"
    probs[7] = float("nan")
    assert asked(probs) == "SGLang's own"


def test_tokens_come_by_their_weights_and_never_without_one() -> None:
    """Weights that do not sum to one, as after a cut. 40,000 draws: five standard deviations are 0.0125."""
    torch.manual_seed(5)
    weights = torch.tensor([0.4, 0.2, 0.1, 0.0, 0.0])
    places = drawn(weights.expand(40000, -1))
    assert places is not None
    shares = torch.bincount(places.view(-1), minlength=5) / 40000
    torch.testing.assert_close(shares, weights / weights.sum(), atol=0.0125, rtol=0.0)
    assert shares[3:].tolist() == [0.0, 0.0]


def test_a_row_without_weights_has_no_place() -> None:
    assert drawn(torch.tensor([[0.5, 0.5], [0.0, 0.0]])) is None
    assert drawn(torch.tensor([[0.5, float("nan")]])) is None
