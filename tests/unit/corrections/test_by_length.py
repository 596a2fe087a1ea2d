"""Thresholds by length: each octave of length is rejected alike, while the policy drifts, and nothing is guessed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_trm import corrections
from moe_trm.corrections.by_length import NUM_OCTAVES, LengthThresholds, LengthTracker, _slopes, octave_name, octave_of
from moe_trm.corrections.calibration import check_by_length, scores_and_lengths
from moe_trm.corrections.evidence import Evidence
from moe_trm.errors import ConfigError
from moe_trm.ratios import LogRatios

TARGET, ROWS = 0.1, 900
Sampler = Callable[[np.random.Generator, Tensor, float], Tensor]


def mean_scores(rng: np.random.Generator, lengths: Tensor, noise: float) -> Tensor:
    """Means of T squared normal deviations: what `trm_avg` sees of iid noise."""
    return torch.from_numpy(rng.chisquare(lengths.numpy()) / lengths.numpy()) * noise**2 / 2


def worst_scores(rng: np.random.Generator, lengths: Tensor, noise: float) -> Tensor:
    """The largest of T squared normal deviations: what `trm_max` sees of iid noise."""
    below = torch.from_numpy(rng.random(len(lengths))) ** (1 / lengths)
    return (torch.special.ndtri((1 + below) / 2) * noise) ** 2 / 2


def signed_scores(rng: np.random.Generator, lengths: Tensor, noise: float) -> Tensor:
    """Means of T normal deviations: what `opsm` sees, half of them negative."""
    return torch.from_numpy(rng.standard_normal(len(lengths))) * noise / lengths.sqrt()


def lengths_of(rng: np.random.Generator, rows: int = ROWS) -> Tensor:
    """8 to 511 tokens, as many in each octave."""
    return torch.from_numpy(np.exp2(rng.uniform(3, 9, rows))).long()


def rejected_shares(sampler: Sampler, noise: Callable[[int], float], *, steps: int, first: int) -> dict[int, float]:
    """Rejected share of each octave over all steps from `first` on; a step is judged before it is learned from."""
    rng, tracker = np.random.default_rng(0), LengthTracker(TARGET, 1)
    rejected, seen = torch.zeros(NUM_OCTAVES), torch.zeros(NUM_OCTAVES)
    for step in range(steps):
        lengths = lengths_of(rng)
        scores = sampler(rng, lengths, noise(step))[:, None]
        if step >= first:
            octave = octave_of(lengths)
            seen.index_add_(0, octave, torch.ones(ROWS))
            rejected.index_add_(0, octave, (scores > tracker.thresholds.at(lengths)).any(dim=1).float())
        tracker.add(scores, lengths)
    return {octave: float(rejected[octave] / seen[octave]) for octave in range(3, 9)}


@pytest.mark.parametrize("sampler", [mean_scores, worst_scores, signed_scores])
@pytest.mark.parametrize(
    "noise",
    [lambda step: 0.1, lambda step: 0.1 * 2 ** (step / 40), lambda step: 0.1 * 2 ** (-step / 40)],
    ids=["steady", "doubles", "halves"],
)
def test_every_octave_is_rejected_alike(sampler: Sampler, noise: Callable[[int], float]) -> None:
    """Within a fifth of the target, for noise that doubles or halves in 40 steps too (scores change fourfold)."""
    shares = rejected_shares(sampler, noise, steps=40, first=8)
    for octave, share in shares.items():
        assert share == pytest.approx(TARGET, rel=0.2), f"{octave_name(octave)}: {shares}"


def test_one_threshold_for_all_lengths_is_not_neutral() -> None:
    """The figures that by_length is there for."""
    rng = np.random.default_rng(0)
    lengths = lengths_of(rng, 20000)
    for sampler, short_is_worse in ((mean_scores, True), (worst_scores, False)):
        scores = sampler(rng, lengths, 0.1)
        above = scores > scores.quantile(1 - TARGET)
        short, long = (float(above[octave_of(lengths) == octave].float().mean()) for octave in (3, 8))
        assert (short > 0.2) is short_is_worse
        assert (long > 0.2) is not short_is_worse


def test_octaves_have_these_edges() -> None:
    lengths = torch.tensor([0, 1, 2, 3, 4, 7, 8, 15, 16, 511, 512, 2**19 - 1, 2**19, 2**23])
    assert octave_of(lengths).tolist() == [-1, 0, 1, 1, 2, 2, 3, 3, 4, 8, 9, 18, 19, 19]
    assert [octave_name(octave) for octave in (0, 3, 19)] == ["1_1", "8_15", "524288_up"]


def test_few_rows_are_not_judged() -> None:
    """Ten rows expected above the threshold are needed, in the octave itself; others' rows do not count for it."""
    rng, tracker = np.random.default_rng(0), LengthTracker(TARGET, 1)
    long = torch.full((5000,), 100)
    tracker.add(mean_scores(rng, long, 0.1)[:, None], long)
    for rows, judged in ((99, False), (1, True)):
        short = torch.full((rows,), 8)
        tracker.add(mean_scores(rng, short, 0.1)[:, None], short)
        assert tracker.thresholds.judged().nonzero()[:, 0].tolist() == ([3, 6] if judged else [6])
        at = tracker.thresholds.at(torch.tensor([8, 15, 16, 100, 0]))[:, 0]
        assert at.isfinite().tolist() == [judged, judged, False, True, False]


def test_rows_without_tokens_and_with_one() -> None:
    rng, tracker = np.random.default_rng(0), LengthTracker(TARGET, 1)
    lengths = torch.tensor([0, 1, 2, 3]).repeat(300)
    scores = torch.where(lengths == 0, 1e9, mean_scores(rng, lengths.clamp(min=1), 0.1))
    tracker.add(scores[:, None], lengths)
    rejected = scores > tracker.thresholds.at(lengths)[:, 0]
    assert not rejected[lengths == 0].any()
    assert float(rejected[lengths == 1].float().mean()) == pytest.approx(TARGET, abs=1.5 / 300)


def test_thresholds_change_evenly_between_octaves() -> None:
    """Linear in log2 length between the knots, as on the other side beyond the last one; no step at an edge."""
    position, value = torch.zeros(NUM_OCTAVES).double(), torch.full((NUM_OCTAVES, 1), math.inf).double()
    position[3:6], value[3:6, 0] = torch.tensor([3.5, 4.5, 5.5]), torch.tensor([4.0, 2.0, 1.0])
    found = LengthThresholds(position, value, *_slopes(position, value))
    lengths = torch.tensor([8, 16, 32, 63])
    assert found.at(lengths)[:, 0].tolist() == pytest.approx([5.0, 3.0, 1.5, 1 - (math.log2(63) - 5.5)])
    assert found.at(torch.tensor([7, 64])).isinf().all()


def test_old_steps_are_forgotten_when_enough_newer_rows_are_there() -> None:
    tracker = LengthTracker(TARGET, 1)
    for step in range(5):
        lengths = torch.cat([torch.full((150,), 8), torch.full((200,), 300), torch.full((3,), 100)])
        tracker.add(torch.full((353, 1), float(step + 1)), lengths)
    # 200 rows are enough: two steps of the first octave, one of the second, all rows of the third.
    assert len(tracker.state()["rows"]) == 8 * 3 * (300 + 200 + 15)
    assert float(tracker.thresholds.at(torch.tensor([8]))) == 5.0


def test_a_broken_batch_is_rejected_whole_and_lifts_the_offset_slowly() -> None:
    rng, tracker = np.random.default_rng(0), LengthTracker(TARGET, 1)
    for _ in range(5):
        lengths = lengths_of(rng)
        tracker.add(mean_scores(rng, lengths, 0.1)[:, None], lengths)
    lengths = lengths_of(rng)
    broken = mean_scores(rng, lengths, 1.0)[:, None]
    assert (broken > tracker.thresholds.at(lengths)).all()
    tracker.add(broken, lengths)
    offset = torch.frombuffer(bytearray(tracker.state()["offset"]), dtype=torch.float64)
    assert 0 < float(offset.max()) <= 1.0


def test_not_finite_scores_never_lift_a_threshold_out_of_reach() -> None:
    tracker, lengths = LengthTracker(TARGET, 1), torch.full((200,), 8)
    scores = torch.ones(200, 1)
    scores[:60] = torch.tensor([math.nan, math.inf]).repeat(30)[:, None]
    tracker.add(scores, lengths)
    assert tracker.thresholds.judged()[3]
    assert (torch.tensor([math.inf]) > tracker.thresholds.at(torch.tensor([8]))[:, 0]).all()


def test_an_octave_of_broken_scores_leaves_its_neighbours_alone() -> None:
    rng, tracker = np.random.default_rng(0), LengthTracker(TARGET, 1)
    lengths = torch.tensor([8, 16, 20, 24, 31]).repeat(400)
    scores = mean_scores(rng, lengths, 0.1)
    scores[lengths == 8] = math.nan
    tracker.add(scores[:, None], lengths)
    rejected = scores > tracker.thresholds.at(lengths)[:, 0]
    assert float(rejected[lengths > 8].float().mean()) == pytest.approx(TARGET, abs=0.01)


def test_scores_that_no_threshold_can_reject_leave_no_trace_for_later() -> None:
    """Rows that all became likelier: nothing to reject, and no offset below all scores that later rows would meet."""
    rng, tracker = np.random.default_rng(0), LengthTracker(TARGET, 1)
    for _ in range(20):
        lengths = lengths_of(rng)
        tracker.add(-1 - mean_scores(rng, lengths, 0.1)[:, None], lengths)
    assert not torch.frombuffer(bytearray(tracker.state()["offset"]), dtype=torch.float64).any()


def test_a_restored_tracker_goes_on_alike() -> None:
    rng, one, other = np.random.default_rng(0), LengthTracker(TARGET, 2), LengthTracker(TARGET, 2)
    other.restore(one.state())
    for step in range(6):
        lengths = lengths_of(rng)
        scores = torch.stack([f(rng, lengths, 0.1) for f in (mean_scores, worst_scores)], dim=1)
        one.add(scores, lengths)
        if step >= 3:
            other.add(scores, lengths)
        else:
            other.restore(one.state())
        assert other.state() == one.state()
    assert other.thresholds.at(lengths).equal(one.thresholds.at(lengths))


def noise_evidence(rng: np.random.Generator, rows: int, noise: float) -> Evidence:
    """Log-ratios of iid noise on rows of 8 to 63 tokens; the first row has none. Half of the rows are negative."""
    lengths = torch.from_numpy(np.exp2(rng.uniform(3, 6, rows))).long()
    lengths[0] = 0
    mask = torch.arange(64) < lengths[:, None]
    log_ratio = torch.from_numpy(rng.standard_normal((rows, 64))) * noise
    zero = torch.zeros_like(log_ratio)
    advantages = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0).double()[:, None].expand(rows, 64)
    return Evidence(LogRatios(zero, log_ratio, log_ratio, mask), advantages)


BY_LENGTH = tuple(
    name
    for name in corrections.names()
    if (rule := corrections.get(name)).calibrate and rule.scope == "sequence" and rule.rejects
)


@pytest.mark.parametrize("name", BY_LENGTH)
def test_every_rule_on_rows_can_be_judged_by_length(name: str) -> None:
    """Thresholds made of a window reject the target in each of its octaves, and no row that the rule spares."""
    rule, fixed = corrections.get(name), {"delta": 0.02} if name == "ln_trm" else {}
    found = noise_evidence(np.random.default_rng(3), 3000, 0.1)
    tracker = LengthTracker(TARGET, rule.num_statistics)
    statistics, lengths = scores_and_lengths(rule, found, **fixed)
    tracker.add(statistics, lengths)
    bound = rule.bind(**dict.fromkeys(rule.calibrated, 1.0), **fixed).following(tracker.thresholds)
    got = bound(found)
    metrics = corrections.finalize(got.metrics)
    assert metrics[f"correction/{name}/unjudged_fraction"] == 0.0
    for octave in ("8_15", "16_31", "32_63"):
        assert metrics[f"correction/{name}/rejected_length_{octave}"] == pytest.approx(TARGET, rel=0.25), octave
    assert f"correction/{name}/rejected_length_4_7" not in metrics
    positive = found.advantages > 0
    if name == "opsm":
        assert (got.keep | ~positive | ~found.mask).all()
    above = (statistics > tracker.thresholds.at(lengths)).any(dim=1)
    judged = found.mask.any(dim=1) & (~positive[:, 0] if name == "opsm" else True)
    assert (~got.keep.any(dim=1))[judged].tolist() == above.tolist()


def test_rows_of_unknown_length_are_kept_and_counted() -> None:
    found = noise_evidence(np.random.default_rng(3), 50, 0.1)
    bound = corrections.get("trm_avg").bind(mean_kl=1e-9).following(LengthTracker(TARGET, 1).thresholds)
    got = bound(found)
    assert got.keep.equal(found.mask)
    assert corrections.finalize(got.metrics)["correction/trm_avg/unjudged_fraction"] == 1.0


@pytest.mark.parametrize(
    ("name", "said"), [("token_k2", "have no length"), ("seq_tis", "rejects no rows"), ("m2po", "cannot be calibrated")]
)
def test_rules_without_a_length_or_a_rejection_are_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_by_length(corrections.get(name))
