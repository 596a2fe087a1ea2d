"""The tolerance with which tests compare the kept ids of two engines."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.integration.kept_bounds import kept_bounds

TOP_P, VOCAB = 0.9, 250


def kept(logprobs: Tensor) -> set[int]:
    ordered, ids = logprobs.exp().sort(descending=True)
    return set(ids[ordered.cumsum(0) - ordered <= TOP_P].tolist())


def test_engines_that_round_otherwise_keep_between_the_bounds() -> None:
    """Two ids of nearly the same probability at the end of the kept ones change places, which is no other mask."""
    generator = torch.Generator().manual_seed(0)
    changed = 0
    for _ in range(400):
        logits = torch.randn(VOCAB, generator=generator)
        first, second = torch.topk(logits.log_softmax(-1), len(kept(logits.log_softmax(-1))) + 1).indices[-2:]
        logits[second] = logits[first] - 1e-6 * torch.rand(1, generator=generator)[0]
        logprobs = logits.log_softmax(-1)
        other = (logits + 2e-6 * torch.randn(VOCAB, generator=generator)).log_softmax(-1)
        changed += kept(logprobs) != kept(other)
        sure, possible = kept_bounds(logprobs, TOP_P, mass=1e-5, each=1e-4)
        assert sure <= kept(other) <= possible
        assert len(possible - sure) <= 4
    assert changed > 50


def test_another_distribution_is_outside() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        logprobs = torch.randn(VOCAB, generator=generator).log_softmax(-1)
        sure, possible = kept_bounds(logprobs, TOP_P, mass=1e-5, each=1e-4)
        last = min(sure, key=lambda place: float(logprobs[place]))
        assert not sure <= kept(logprobs) - {last}
        worst = int(logprobs.argmin())
        assert not kept(logprobs) | {worst} <= possible
