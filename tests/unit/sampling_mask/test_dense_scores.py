"""Entropy, likeliest ids and sum of squares in the pass of the log-probs; padded vocabularies; long rows.

Shape letters: N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import resource

import pytest
import torch

from moe_trm.sampling_mask.dense import full_logprobs, full_scores
from moe_trm.sampling_mask.logprobs import (
    log_kept_masses,
    masked_logprobs,
    masked_logprobs_and_kl,
)
from moe_trm.sampling_mask.vocabulary import Vocabulary
from tests.exact_kl import exact_kl
from tests.unit.sampling_mask.test_masked_logprobs import make_case

TAU = 0.7


def test_everything_in_one_pass_equals_the_dense_computation() -> None:
    hidden, weight, target, *_ = make_case([1] * 7, V=23)
    log_p = (hidden @ weight.T / TAU).log_softmax(-1)
    got = full_scores(hidden, weight, target, TAU, chunk_tokens=3, entropy=True, sum_of_squares=True, top_k=4)
    torch.testing.assert_close(got.logprobs, log_p.gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(got.entropy, -(log_p.exp() * log_p).sum(1))
    torch.testing.assert_close(got.sum_of_squares, log_p.exp().square().sum(1))
    values, ids = log_p.topk(4)
    torch.testing.assert_close(got.top_logprobs, values)
    assert got.top_ids is not None
    assert torch.equal(got.top_ids, ids)
    assert torch.equal(got.logprobs, full_logprobs(hidden, weight, target, TAU, chunk_tokens=3))


def test_gradients_of_log_probs_and_entropy_by_finite_differences() -> None:
    hidden, weight, target, *_ = make_case([1] * 4, V=9)
    hidden.requires_grad_(), weight.requires_grad_()

    def both(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = full_scores(h, w, target, TAU, chunk_tokens=3, entropy=True)
        assert scores.entropy is not None
        return scores.logprobs, scores.entropy

    assert torch.autograd.gradcheck(both, (hidden, weight))


def test_padding_of_the_vocabulary_takes_no_part() -> None:
    sizes = [2, 1, 5]
    hidden, weight, target, ids, offsets = make_case(sizes, V=9)
    padded = torch.cat([weight, torch.full((7, 5), 50.0, dtype=torch.float64)])
    real = Vocabulary(num_ids=9)
    for compute in (
        lambda w, v: full_logprobs(hidden, w, target, TAU, vocabulary=v),
        lambda w, v: masked_logprobs(hidden, w, target, ids, offsets, TAU, vocabulary=v),
        lambda w, v: log_kept_masses(hidden, w, ids, offsets, TAU, vocabulary=v),
    ):
        torch.testing.assert_close(compute(padded, real), compute(weight, Vocabulary()))
    padded.requires_grad_()
    total = full_logprobs(hidden, padded, target, TAU, vocabulary=real).sum()
    (total + masked_logprobs(hidden, padded, target, ids, offsets, TAU, vocabulary=real).sum()).backward()
    assert padded.grad is not None
    assert not padded.grad[9:].any()
    assert padded.grad[:9].any()


@pytest.mark.parametrize("vocabulary", [11, 1000])
def test_kl_comes_from_the_same_pass_and_has_no_gradient(vocabulary: int) -> None:
    hidden, weight, target, ids, offsets = make_case([1, 4, 11, 2], V=vocabulary)
    hidden.requires_grad_()
    row = torch.repeat_interleave(offsets.diff())
    scores = torch.randn(len(ids), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    totals = torch.zeros(4, dtype=torch.float64).index_add(0, row, scores.exp())
    mu = scores - totals.log()[row]
    logprobs, kl = masked_logprobs_and_kl(hidden, weight, target, ids, offsets, mu, TAU)
    assert torch.equal(logprobs, masked_logprobs(hidden, weight, target, ids, offsets, TAU))
    assert not kl.requires_grad
    with torch.no_grad():
        logits = (hidden[row] * weight[ids]).sum(-1) / TAU
        expected = exact_kl(
            mu, torch.cat([own.log_softmax(0) for own in logits.split(offsets.diff().tolist())]), offsets
        )
    torch.testing.assert_close(kl, expected)
    assert kl[0] == 0
    assert (kl[1:] > 1e-3).all()


def test_a_row_of_100_000_tokens_stays_small() -> None:
    """A mask or logits of [N, V] would take 16 GB here."""
    sizes = (1 + torch.arange(100_000) % 8).tolist()
    N, V, H = len(sizes), 40_000, 8
    gen = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    first = torch.repeat_interleave(torch.randint(0, V, (N,), generator=gen), torch.tensor(sizes))
    place = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(torch.tensor(sizes))
    ids = (first + 7 * place) % V
    hidden = torch.randn(N, H, generator=gen).requires_grad_()
    weight = torch.randn(V, H, generator=gen).requires_grad_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    logprobs, kl = masked_logprobs_and_kl(
        hidden,
        weight,
        ids[offsets[:-1]],
        ids,
        offsets,
        torch.zeros(len(ids)).sub(torch.repeat_interleave(offsets.diff(), offsets.diff()).log()),
    )
    logprobs.sum().backward()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 400 * 1024
    assert logprobs.isfinite().all()
    assert kl.isfinite().all()
    assert not logprobs[::8].any()
