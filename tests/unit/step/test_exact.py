"""The invariant of exact runs: the first token that differs ends the run, before anything trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_trm.learner.protocol import Scores
from moe_trm.step.exact import InexactError, proved
from moe_trm.step.passes import AnchoredMinibatch
from routing.record.sources import ReplayReport
from tests.unit.step.test_rate_guard import minibatches

CLEAN = ReplayReport(replayed=100, matched=100)


def parts() -> list[AnchoredMinibatch]:
    """Minibatches whose scores are the rollout's log-probs; behind the mask they are something else."""
    return [
        replace(
            part, scores=[Scores(torch.where(each.mask, each.rollout_logprobs, torch.nan)) for each in part.batches]
        )
        for part in minibatches([1.0] * 4)
    ]


def test_equal_log_probs_and_no_flip_are_proved() -> None:
    assert proved(parts(), CLEAN) is CLEAN
    assert proved(parts(), ReplayReport()) == ReplayReport()


def test_one_last_bit_is_told_with_its_text() -> None:
    differing = parts()
    [part, *_] = differing
    batch, scores = part.batches[0], part.scores[0].logprobs
    row, place = batch.mask.nonzero()[1].tolist()
    scores[row, place] = torch.nextafter(scores[row, place], torch.tensor(0.0))
    with pytest.raises(InexactError, match=rf"token {place + 1} of a row .* the first of 1 of") as caught:
        proved(differing, CLEAN)
    ids = [*batch.input_ids[row, : place + 1].tolist(), int(batch.target_ids[row, place])]
    assert caught.value.token_ids == tuple(ids)
    told = caught.value.because("layer 2: attention differs first")
    assert "exact run: layer 2: attention differs first" in str(told)
    assert told.got == caught.value.got


def test_what_is_not_a_number_differs() -> None:
    differing = parts()
    differing[-1].scores[0].logprobs[differing[-1].batches[0].mask] = torch.nan
    with pytest.raises(InexactError):
        proved(differing, CLEAN)


def test_a_flip_ends_the_run() -> None:
    with pytest.raises(InexactError, match=r"flips in 0.01 of"):
        proved(parts(), replace(CLEAN, local_flips=1))
