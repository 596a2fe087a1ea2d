"""The bound on flips of each sample and layer: wrong samples among many are found, clean steps never are.

Steps are made of numbers. A token has a tendency of its own to flip, samples differ in their rates, and so do layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from routing import FlipBoundError, ReplayProofError
from routing.judge.flip_bound import _quantiles, fewest_tokens, suspects
from routing.judge.sample_flips import PassFlips, SampleFlips, keys_of, total
from routing.layout.row_ids import UNNAMED, name_of
from routing.replay.replay_pass import judge

LAYERS = 12
SHAPES = [(1, 8), (2, 8), (8, 128)]


@dataclass
class Step:
    """Lost experts of each token `[tokens, layers]` of each sample."""

    samples: list[np.ndarray]
    top_k: int
    num_experts: int

    def counts(self) -> SampleFlips:
        due = np.array([[len(one)] * LAYERS for one in self.samples])
        return SampleFlips.of(
            np.arange(len(due)),
            due,
            np.array([(one > 0).sum(0) for one in self.samples]),
            np.array([one.sum(0) for one in self.samples]),
        )

    def spoil(self, sample: int, layer: int | slice, share: float, rng: np.random.Generator) -> None:
        """Routes that agree with the live router by chance only, but for `1 - share` of the tokens' experts."""
        wrong = rng.hypergeometric(
            self.top_k, self.num_experts - self.top_k, self.top_k, self.samples[sample][:, layer].shape
        )
        lost = self.top_k - wrong
        self.samples[sample][:, layer] = np.where(rng.random(lost.shape) < share, lost, 0)


def clean(rng: np.random.Generator, rate: float, top_k: int, num_experts: int, lengths: np.ndarray) -> Step:
    samples = []
    layers = rng.uniform(0.6, 1.4, LAYERS)
    for length in lengths:
        own = rate * rng.gamma(6.0, 1 / 6)
        tendency = rng.gamma(0.5, 2.0, (length, 1))
        flips = rng.random((length, LAYERS)) < np.minimum(own * tendency * layers, 0.9)
        # A flip exchanges one expert, seldom two.
        second = (rng.random(flips.shape) < 0.1) & (top_k > 1)
        samples.append(flips * (1 + second))
    return Step(samples, top_k, num_experts)


def lengths_of(rng: np.random.Generator, number: int = 32) -> np.ndarray:
    return np.maximum(3, rng.lognormal(4.0, 1.0, number).astype(int))


def found(step: Step) -> list[int]:
    return [suspect.key for suspect in suspects(step.counts(), step.top_k, step.num_experts)]


@pytest.mark.parametrize(("top_k", "num_experts"), SHAPES)
@pytest.mark.parametrize("rate", [0.01, 0.15])
def test_clean_steps_have_no_suspect_in_200_steps(rate: float, top_k: int, num_experts: int) -> None:
    rng = np.random.default_rng(round(rate * 1000) + top_k)
    assert [found(clean(rng, rate, top_k, num_experts, lengths_of(rng))) for _ in range(200)] == [[]] * 200


@pytest.mark.parametrize(("top_k", "num_experts"), SHAPES)
@pytest.mark.parametrize("rate", [0.01, 0.15])
@pytest.mark.parametrize("fault", ["random", "eight shifted", "one layer", "two layers"])
def test_wrong_samples_among_many_are_all_found(fault: str, rate: float, top_k: int, num_experts: int) -> None:
    """Shifted rows keep a fifth of their experts, as neighbours' routes are alike."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        step = clean(rng, rate, top_k, num_experts, np.maximum(60, lengths_of(rng)))
        bad = list(range(8)) if fault == "eight shifted" else [int(rng.integers(32))]
        layers = {"one layer": slice(5, 6), "two layers": slice(5, 7)}.get(fault, slice(None))
        for sample in bad:
            step.spoil(sample, layers, 0.8 if fault == "eight shifted" else 1.0, rng)
        assert sorted(found(step)) == sorted(bad)
        if "layer" in fault:
            assert suspects(step.counts(), top_k, num_experts)[0].layer in (5, 6)


@pytest.mark.parametrize(("top_k", "num_experts"), SHAPES)
def test_the_bound_knows_how_few_tokens_prove_nothing(top_k: int, num_experts: int) -> None:
    least = fewest_tokens(top_k, num_experts)
    assert 4 <= least <= 10
    for length in (3, least + 6):
        rng = np.random.default_rng(length)
        step = clean(rng, 0.003, top_k, num_experts, np.array([*lengths_of(rng, 31), length]))
        step.samples[-1] = np.full((length, LAYERS), top_k)
        assert found(step) == ([31] if length > least else [])


@pytest.mark.parametrize(("top_k", "num_experts"), SHAPES)
def test_up_to_two_thirds_of_the_samples_may_be_wrong_and_are_still_found(top_k: int, num_experts: int) -> None:
    """Rows beside each other share experts: half of the routes of a late row are right. Nothing else is suspect."""
    for number in (8, 16, 22):
        rng = np.random.default_rng(number)
        step = clean(rng, 0.02, top_k, num_experts, np.full(32, 60))
        for sample in range(number):
            step.spoil(sample, slice(None), 0.55, rng)
        assert sorted(found(step)) == list(range(number))


def test_a_batch_that_is_wrong_as_a_whole_explains_nothing() -> None:
    """The quartile is wrong then: what a sample may lose is bound absolutely too."""
    rng = np.random.default_rng(0)
    step = clean(rng, 0.01, 2, 8, np.full(6, 60))
    for sample in range(6):
        step.spoil(sample, slice(None), 1.0, rng)
    assert sorted(found(step)) == list(range(6))


def test_medians_are_numpys_over_the_known_values_of_each_column() -> None:
    """Columns of all lengths, odd and even, and one without a value."""
    rng = np.random.default_rng(0)
    for rows in (1, 2, 7, 8):
        values = rng.random((rows, 12))
        known = rng.random(values.shape) < 0.6
        known[:, 0], known[:, 1] = False, True
        columns = zip(values.T, known.T, strict=True)
        requested = [np.median(column[real]) if real.any() else 0.0 for column, real in columns]
        found = _quantiles(np.where(known, values, np.inf), known.sum(0), 1 / 2)
        np.testing.assert_array_equal(found, requested)


def counters_of(flips: SampleFlips) -> torch.Tensor:
    due, flipped = flips.due.sum(0), flips.flipped.sum(0)
    return torch.from_numpy(np.stack([due, due, due, flipped, 0 * due], axis=1))


@pytest.mark.parametrize(("due", "experts"), [(0, (2, 8)), (400, (8, 8))])
def test_nothing_due_and_a_layer_that_takes_all_experts_have_no_suspects(due: int, experts: tuple[int, int]) -> None:
    nothing = np.zeros((2, LAYERS), np.int64)
    assert suspects(SampleFlips.of(np.arange(2), nothing + due, nothing, nothing), *experts) == []


def test_the_report_names_sample_layer_rate_and_what_was_expected() -> None:
    rng = np.random.default_rng(3)
    step = clean(rng, 0.01, 2, 8, np.full(32, 60))
    step.spoil(7, slice(4, 5), 1.0, rng)
    flips = step.counts()
    with pytest.raises(FlipBoundError, match=r"sample 7, layer 4: 9\d\.\d% of 60 sets flip, .* were expected") as error:
        judge(counters_of(flips), 0.3, flips, 2, 8)
    assert isinstance(error.value, ReplayProofError)
    assert [suspect.key for suspect in error.value.suspects] == [7]
    assert error.value.report.applied_fraction == 1.0
    assert judge(counters_of(flips), 1.0, flips, 2, 8).replayed == 32 * 60 * LAYERS


@pytest.mark.parametrize(("flipped", "stops"), [(30, False), (31, True)])
@pytest.mark.parametrize("layer", [0, 5, LAYERS - 1])
def test_one_layer_of_many_is_bound_and_the_bound_itself_passes(layer: int, flipped: int, stops: bool) -> None:
    """100 tokens, one sample: 30% of one layer's sets flip, and 2.5% of all."""
    counts = np.zeros((1, LAYERS), np.int64)
    counts[0, layer] = flipped
    flips = SampleFlips.of(np.zeros(1, np.int64), np.full((1, LAYERS), 100), counts, counts)
    if not stops:
        assert judge(counters_of(flips), 0.3, flips, 8, 128).local_flips == flipped
        return
    with pytest.raises(FlipBoundError, match=r"worst rate of a layer 0\.310, max_local_flip_rate 0\.3"):
        judge(counters_of(flips), 0.3, flips, 8, 128)


def test_counts_of_a_pass_are_by_sample_in_both_orders() -> None:
    flipped = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]])
    for last, order in ((False, flipped), (True, flipped.t())):
        one = PassFlips([5, 9], torch.tensor([4, 3]), (1,), 3, sample_last=last, device=torch.device("cpu"))
        marks = order.reshape(-1).int()
        one.count(1, torch.stack((marks, 2 * marks)))
        again = PassFlips([9], torch.tensor([2]), (1,), 3, sample_last=last, device=torch.device("cpu"))
        padding = PassFlips([-1], torch.tensor([0]), (1,), 3, sample_last=last, device=torch.device("cpu"))
        summed = total([one, again, padding], 3)
        assert summed.keys.tolist() == [5, 9]
        assert summed.due.tolist() == [[0, 4, 0], [0, 5, 0]]
        assert summed.flipped.tolist() == [[0, 3, 0], [0, 1, 0]]
        assert summed.lost.tolist() == [[0, 6, 0], [0, 2, 0]]


def test_samples_without_ids_are_named_by_their_row() -> None:
    keys = keys_of(None, torch.tensor([[1, 2], [3, 4]]))
    assert [name_of(key) for key in keys] == ["row 0 of a micro-batch", "row 1 of a micro-batch"]
    assert all(key >= UNNAMED for key in keys)
    assert keys != keys_of(None, torch.tensor([[1, 2], [3, 5]]))
    assert keys_of((4, 6), torch.zeros(2, 2)) == [4, 6]
    assert name_of(4) == "sample 4"
