"""Masked and full log-probs against dense computation, float64 finite differences and hand-worked values.

Shape letters: N tokens, H hidden, V vocabulary, M kept ids.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_trm.errors import RecordRejected
from moe_trm.sampling_mask.dense import full_logprobs
from moe_trm.sampling_mask.logprobs import (
    log_kept_masses,
    masked_logprobs,
    masked_logprobs_and_kl,
)

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make_case(sizes: list[int], V: int = 11, H: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64) -> Case:
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(sizes), H, generator=gen, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, H, generator=gen, dtype=torch.float64).to(dtype)
    rows = [torch.randperm(V, generator=gen)[:size] for size in sizes]
    target = torch.stack([row[torch.randint(len(row), (), generator=gen)] for row in rows])
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    return hidden, weight, target, torch.cat(rows), offsets


def dense_masked(hidden: Tensor, weight: Tensor, target: Tensor, ids: Tensor, offsets: Tensor, tau: float) -> Tensor:
    logits = hidden @ weight.T / tau
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    for n in range(len(target)):
        allowed[n, ids[offsets[n] : offsets[n + 1]]] = True
    return logits.masked_fill(~allowed, -torch.inf).log_softmax(-1).gather(1, target[:, None])[:, 0]


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 11), min_size=1, max_size=9),
    tau=st.floats(0.3, 3.0),
    max_rows=st.integers(1, 30),
    seed=st.integers(0, 99),
    vocabulary=st.sampled_from([11, 2000]),
)
def test_masked_equals_dense_value_and_gradient(
    sizes: list[int], tau: float, max_rows: int, seed: int, vocabulary: int
) -> None:
    """With 11 ids most supports are wide and take the matrix product, with 2000 they are gathered."""
    hidden, weight, target, ids, offsets = make_case(sizes, V=vocabulary, seed=seed)
    coefficients = torch.linspace(-1, 2, len(sizes), dtype=torch.float64)
    results = []
    for compute in (
        lambda h, w: masked_logprobs(h, w, target, ids, offsets, tau, max_rows),
        lambda h, w: dense_masked(h, w, target, ids, offsets, tau),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value = compute(h, w)
        (value * coefficients).sum().backward()
        results.append((value.detach(), h.grad, w.grad))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("vocabulary", [11, 600])
def test_gradients_by_finite_differences(vocabulary: int) -> None:
    hidden, weight, target, ids, offsets = make_case([1, 4, 11, 2], V=vocabulary, H=2)
    hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: masked_logprobs(h, w, target, ids, offsets, 0.7, 6), (hidden, weight))


@pytest.mark.parametrize("vocabulary", [3, 200])
def test_single_kept_id_is_exactly_zero_with_zero_gradient(vocabulary: int) -> None:
    hidden, weight, target, ids, offsets = make_case([1, 1, 1], V=vocabulary, dtype=torch.float32)
    hidden.requires_grad_(), weight.requires_grad_()
    value = masked_logprobs(hidden, weight, target, ids, offsets, 0.8)
    value.sum().backward()
    assert torch.equal(value, torch.zeros(3))
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_whole_vocabulary_kept_equals_full_logprobs() -> None:
    hidden, weight, target, ids, offsets = make_case([11, 11, 11])
    masked = masked_logprobs(hidden, weight, target, ids, offsets, 1.3)
    torch.testing.assert_close(masked, full_logprobs(hidden, weight, target, 1.3, chunk_tokens=2))
    torch.testing.assert_close(masked, (hidden @ weight.T / 1.3).log_softmax(-1).gather(1, target[:, None])[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [11, 1000])
def test_bits_do_not_depend_on_gradient_mode_nor_gathered_ones_on_neighbours(
    dtype: torch.dtype, vocabulary: int
) -> None:
    sizes = [3, 1, 8, 5, 2, 11, 4]
    hidden, weight, target, ids, offsets = make_case(sizes, V=vocabulary, H=64, dtype=dtype)
    with torch.no_grad():
        frozen = masked_logprobs(hidden, weight, target, ids, offsets, 0.9)
        frozen_full = full_logprobs(hidden, weight, target, 0.9)
    live = masked_logprobs(hidden.requires_grad_(), weight.requires_grad_(), target, ids, offsets, 0.9)
    assert live.dtype == torch.float32
    assert torch.equal(frozen, live)
    assert torch.equal(frozen_full, full_logprobs(hidden, weight, target, 0.9))
    part = slice(int(offsets[2]), int(offsets[5]))
    alone = masked_logprobs(hidden[2:5], weight, target[2:5], ids[part], offsets[2:6] - offsets[2], 0.9, max_rows=4)
    if vocabulary == 1000:
        assert torch.equal(alone, frozen[2:5])
    torch.testing.assert_close(alone, frozen[2:5])


def test_golden_top_p_support() -> None:
    weight = torch.tensor([[2.0], [1.0], [0.5], [0.0], [-1.0]], dtype=torch.float64)
    hidden = torch.ones(3, 1, dtype=torch.float64)
    target, ids, offsets = torch.tensor([0, 1, 3]), torch.tensor([0, 1, 0, 1, 0, 1, 3]), torch.tensor([0, 2, 4, 7])
    expected = torch.tensor([-0.251929, -1.501929, -2.813781], dtype=torch.float64)
    torch.testing.assert_close(masked_logprobs(hidden, weight, target, ids, offsets, 0.8), expected, rtol=0, atol=1e-6)
    probs = torch.tensor([0.647055, 0.185385, 0.053114], dtype=torch.float64)
    full = full_logprobs(hidden, weight, target, 0.8)
    torch.testing.assert_close(full.exp(), probs, rtol=0, atol=1e-6)
    mass, least = log_kept_masses(hidden, weight, ids, offsets, 0.8, chunk_tokens=2)
    torch.testing.assert_close(mass.exp()[0], torch.tensor(0.832440, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(masked_logprobs(hidden, weight, target, ids, offsets, 0.8) + mass, full)
    torch.testing.assert_close(least.exp()[[0, 2]], probs[[1, 2]], rtol=0, atol=1e-6)


def test_the_least_likely_ids_are_all_that_are_nearly_tied() -> None:
    weight = torch.tensor([[2.0], [0.0], [0.05], [0.2]], dtype=torch.float64)
    ids, offsets = torch.arange(4), torch.tensor([0, 4])
    _, least = log_kept_masses(torch.ones(1, 1, dtype=torch.float64), weight, ids, offsets)
    probs = weight[:, 0].softmax(0)
    torch.testing.assert_close(least.exp()[0], probs[1] + probs[2])


def test_exact_kl_golden_and_edges() -> None:
    mu, pi = torch.tensor([0.5, 0.3, 0.15, 0.05]).double(), torch.tensor([0.4, 0.4, 0.1, 0.1]).double()
    offsets = torch.tensor([0, 4, 5, 7, 9, 11])
    inf = torch.tensor([-torch.inf]).double()
    half = torch.tensor([0.5]).double().log()
    zero, nan = torch.zeros(1).double(), torch.tensor([torch.nan]).double()
    mu_all = torch.cat([mu.log(), zero, zero, inf, half, half, half, half])
    pi_all = torch.cat([pi.log(), zero, zero, inf, half, inf, half, nan])
    hidden, ids = torch.ones(5, 1).double(), torch.arange(11)
    _, got = masked_logprobs_and_kl(hidden, pi_all[:, None], ids[offsets[:-1]], ids, offsets, mu_all)
    assert got[0].item() == pytest.approx(0.051430, abs=1e-6)
    assert got[1:4].tolist() == [0.0, 0.0, torch.inf]
    assert got[4].isnan()


def test_large_logits_stay_finite() -> None:
    hidden, weight, target, ids, offsets = make_case([4, 4], dtype=torch.float32)
    value = masked_logprobs(hidden * 1e4, weight, target, ids, offsets, 1.0)
    assert value.isfinite().all()
    assert (value <= 0).all()


def test_no_tokens_gives_an_empty_differentiable_result() -> None:
    hidden, weight = torch.zeros(0, 5, requires_grad=True), torch.zeros(11, 5, requires_grad=True)
    none, offsets = torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    total = masked_logprobs(hidden, weight, none, none, offsets).sum() + full_logprobs(hidden, weight, none).sum()
    total.backward()
    assert weight.grad is not None
    assert not weight.grad.any()
    assert log_kept_masses(hidden, weight, none, offsets).shape == (2, 0)


def test_bad_supports_are_refused() -> None:
    hidden, weight, target, ids, offsets = make_case([3, 4])
    outside = (set(range(11)) - set(ids[:3].tolist())).pop()
    with pytest.raises(RecordRejected, match="not exactly once"):
        masked_logprobs(hidden, weight, torch.tensor([outside, int(target[1])]), ids, offsets)
    with pytest.raises(RecordRejected, match="does not fit"):
        masked_logprobs(hidden, weight, target, ids[:-1], offsets)
    with pytest.raises(RecordRejected, match="does not fit"):
        masked_logprobs(hidden, weight, target, ids, offsets[:-1])
    with pytest.raises(RecordRejected, match="not exactly once"):
        masked_logprobs(hidden, weight, target, ids, torch.tensor([0, 0, len(ids)]))
