"""Simulated schedules: by hand for small cases, and the shapes that papers report."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.tools.plan.lengths import log_normal
from moe_trm.tools.plan.simulate import SimulatedSchedule, SimulatedServers, simulate

SYNC, ONE_STEP, ASYNC = SimulatedSchedule(0), SimulatedSchedule(1), SimulatedSchedule(2)


def workers(number: int, servers: int = 1, **options: float) -> SimulatedServers:
    """Requests that never slow each other down: one token per second each."""
    return SimulatedServers(servers, number, lambda _n: 1.0, **options)


def test_sync_samples_trains_and_pushes_in_turn() -> None:
    found = simulate([[5, 3], [4, 2], [6, 6]], 10, workers(2, push_s=1), SYNC)
    assert [*found.ends_s] == [15, 15 + 1 + 4 + 10, 30 + 1 + 6 + 10]
    assert found.learner_idle == pytest.approx(1 - 30 / 47)
    assert found.server_idle == pytest.approx(1 - (5 + 4 + 6) / 47)
    assert found.slot_use == pytest.approx((5 + 3 + 4 + 2 + 6 + 6) / (2 * 47))


def test_one_step_trains_while_it_samples() -> None:
    """Steps last as long as the slower side: here the learner, after the first batch."""
    found = simulate([[4, 4]] * 4, 10, workers(2), ONE_STEP)
    assert [*found.ends_s] == [14, 24, 34, 44]
    found = simulate([[10, 10]] * 4, 4, workers(2), ONE_STEP)
    assert [*found.ends_s] == [14, 24, 34, 44]
    assert found.server_idle == pytest.approx(4 / 44)


def test_a_waiting_push_drains_and_an_interrupting_one_does_not() -> None:
    """The push at 14 finds the long answer of batch 1 running, which ends at 30. Only then batch 3 can be issued.

    The push after step 1 drains it, so that step 2, which ended at 38, hands its weights over at 42.
    """
    batches = [[10], [30], [10], [10]]
    wait = simulate(batches, 4, workers(2, push_s=1), ASYNC)
    assert [*wait.ends_s] == [14, 34, 38, 42 + 4]
    interrupt = simulate(batches, 4, workers(2, push_s=1), SimulatedSchedule(2, interrupts=True))
    assert [*interrupt.ends_s] == [14, 35, 39, 43]


def test_interrupted_samples_compute_their_prefix_again() -> None:
    """At 12 the second answer has 12 tokens, which take 12 / 6 seconds, after a push of one second."""
    fleet = workers(2, push_s=1.0, prefill_tokens_s=6)
    found = simulate([[10], [20]], 2, fleet, SimulatedSchedule(1, interrupts=True))
    assert [*found.ends_s] == [12, 20 + 1 + 2 + 2]


def test_a_learner_that_broadcasts_waits_for_the_push() -> None:
    """Batch 1 is there at 10. The push begins at 14, when the servers are empty, and takes a second."""
    batches = [[10], [10]]
    assert [*simulate(batches, 4, workers(2, push_s=1), ONE_STEP).ends_s] == [14, 18]
    assert [*simulate(batches, 4, workers(2, push_s=1), SimulatedSchedule(1, learner_sends=True)).ends_s] == [14, 19]


def test_requests_share_a_server() -> None:
    """Two requests at half the speed each; when the short one has ended, the other has the server alone."""
    shared = SimulatedServers(1, 2, lambda n: 1 / n)
    assert [*simulate([[3, 5]], 1, shared, SYNC).ends_s] == [6 + 2 + 1]
    assert [*simulate([[3, 5]], 1, SimulatedServers(2, 2, lambda n: 1 / n), SYNC).ends_s] == [5 + 1]


def test_requests_in_flight_are_bounded() -> None:
    assert [*simulate([[4] * 4], 1, workers(4), SYNC).ends_s] == [5]
    assert [*simulate([[4] * 4], 1, workers(4, in_flight=2), SYNC).ends_s] == [9]


def test_staleness_bounds_what_is_issued_ahead() -> None:
    """A learner of 100 s, batches of one second: the servers fill eta + 1 batches and then wait."""
    found = simulate([[1]] * 6, 100, workers(8), ASYNC)
    assert [*found.ends_s] == [1 + 100 * (step + 1) for step in range(6)]
    assert found.server_idle == pytest.approx(1 - 4 / 601, abs=0.005)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 60), min_size=4, max_size=4), min_size=2, max_size=6),
    st.integers(1, 60),
    st.integers(0, 3),
)
def test_async_is_never_slower_than_sync(batches: list[list[int]], train_s: int, staleness: int) -> None:
    """Of answers with a slot each; beyond that, list scheduling has its anomalies."""
    fleet = workers(64, push_s=1)
    sync = simulate(batches, train_s, fleet, SYNC)
    for interrupts in (False, True):
        found = simulate(batches, train_s, fleet, SimulatedSchedule(staleness, interrupts))
        assert found.ends_s[-1] <= sync.ends_s[-1] + 1e-6


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 8))
def test_greedy_generation_keeps_its_bound(lengths: list[int], slots: int) -> None:
    """ROLL Flash (arXiv 2510.11345) after Graham 1969: at most Q / K mean + longest, and at least the work per slot."""
    took = simulate([lengths], 0, workers(slots), SYNC).ends_s[-1]
    work = sum(lengths) / slots
    assert max(work, max(lengths)) - 1e-6 <= took <= work + max(lengths) + 1e-6


@pytest.mark.parametrize("staleness", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("train_s", [1.0, 200.0, 2000.0])
def test_async_steps_keep_the_bound_of_roll_flash(staleness: int, train_s: float) -> None:
    """max(training, Q / K mean + longest / (alpha + 1)) a step, where answers go on under new weights.

    So speed-up is at most synchronous time over the larger of training and work per slot, which it comes close to.
    """
    slots, size = 32, 128
    batches = log_normal(100, 1.0, 2000, 0).batches(24, size)
    fleet = workers(slots)
    sync = simulate(batches, train_s, fleet, SYNC).step_s
    found = simulate(batches, train_s, fleet, SimulatedSchedule(staleness, interrupts=True)).step_s
    work, longest = size / slots * fmean(map(fmean, batches)), max(map(max, batches))
    if staleness:
        first = (work + longest + train_s) / len(batches)
        assert found <= max(train_s, work + longest / (staleness + 1)) + first
    assert sync / found <= (work + longest + train_s) / max(work, train_s)
    if staleness == 8:
        assert found <= 1.25 * max(work, train_s)


def test_partial_rollout_halves_a_long_tail() -> None:
    """One answer in 64 is 20 times as long as the others. Draining for it takes all of it in every step.

    Going on with it under new weights spreads it over two steps at staleness 1, over three at 2.
    """
    batches = [[1000] + [50] * 63 for _ in range(24)]
    fleet = workers(256)
    wait = simulate(batches, 10, fleet, ONE_STEP).step_s
    half = simulate(batches, 10, fleet, SimulatedSchedule(1, interrupts=True)).step_s
    third = simulate(batches, 10, fleet, SimulatedSchedule(2, interrupts=True)).step_s
    assert wait == pytest.approx(1000, rel=0.05)
    assert half == pytest.approx(wait / 2, rel=0.1)
    assert third == pytest.approx(wait / 3, rel=0.15)


def test_batches_have_the_distribution_and_repeat() -> None:
    lengths = log_normal(1000, 0.8, 8192, 512)
    batches = lengths.batches(4, 256)
    assert batches == lengths.batches(4, 256) != lengths.batches(4, 256, seed=1)
    assert fmean(map(fmean, batches)) == pytest.approx(lengths.mean, rel=0.02)
    assert sorted(batches[0])[128] == pytest.approx(1000, rel=0.02)
    assert max(lengths.values) <= 8192


def test_servers_and_learner_on_the_same_cores_slow_each_other_down() -> None:
    """By hand: at half speed while both compute.

    Batch 0 is there at 4. Batch 1 then decodes at half speed until 12; its training's 10 s have 4 behind them, and the
    6 that are left take 6, as nothing runs beside them: batch 2 waits for version 1.
    """
    fleet = workers(2, sharing=0.5)
    found = simulate([[4, 4]] * 3, 10, fleet, ONE_STEP)
    first = 4 + 8 + 6
    assert [*found.ends_s] == [first, first + 8 + 6, first + 14 + 10]
    assert found.learner_busy_s == pytest.approx(14 + 14 + 10)


def test_a_learner_of_its_own_is_never_slowed_down() -> None:
    """In turn, nobody shares; and a push is no computing."""
    batches, fleet = [[5, 3], [4, 2], [6, 6]], workers(2, push_s=1)
    assert simulate(batches, 10, fleet, SYNC).ends_s == simulate(batches, 10, replace(fleet, sharing=0.5), SYNC).ends_s


@given(st.floats(0.3, 1.0), st.floats(1, 20))
@settings(max_examples=30)
def test_shared_steps_take_the_shorter_side_slowly_and_then_what_is_left(sharing: float, train_s: float) -> None:
    """The shorter side at shared speed, then what is left of the longer one, against both in turn."""
    batches, fleet = [[7] * 4] * 5, workers(4, sharing=sharing)
    turns = simulate(batches, train_s, fleet, SYNC).ends_s[-1]
    overlapped = simulate(batches, train_s, fleet, ONE_STEP).ends_s[-1]
    short, long = sorted((7.0, train_s))
    assert overlapped == pytest.approx(7 + train_s + 4 * (short / sharing + long - short))
    assert turns == pytest.approx(5 * (7 + train_s))


def test_a_batch_of_older_weights_takes_a_pass_more_for_each_version() -> None:
    """Batch 0 is of the learner's weights; later ones of those before. In turn, none is."""
    batches, fleet = [[4, 4]] * 4, workers(2)
    assert [*simulate(batches, 10, fleet, ONE_STEP, 3).ends_s] == [14, 14 + 13, 14 + 26, 14 + 39]
    assert simulate(batches, 10, fleet, SYNC, 3) == simulate(batches, 10, fleet, SYNC)
    assert simulate(batches, 10, fleet, ONE_STEP, 3).learner_busy_s == pytest.approx(10 + 3 * 13)


def test_an_answer_that_spans_versions_has_a_pass_for_each() -> None:
    """The push at 14 interrupts the answer of 30: versions 0 and 1 sampled it, and version 1 is the learner's."""
    found = simulate([[10], [30]], 4, workers(2), SimulatedSchedule(1, interrupts=True), 3)
    assert found.versions == ((0,), (0, 1))
    assert [*found.ends_s] == [14, 30 + 4 + 3]


def test_parts_of_a_step_have_the_versions_of_their_own_samples() -> None:
    """The second batch streams in two parts of one answer. Only its long answer outlives the push at 9."""
    found = simulate([[5, 5], [6, 20]], 4, workers(4), SimulatedSchedule(1, interrupts=True, parts=2), 2)
    assert found.versions == ((0,), (0, 1))
    assert [*found.ends_s] == [9, 20 + 2 + 1]


def test_each_older_version_has_a_pass_of_its_own() -> None:
    """Steps end at 3 and 6, and each push interrupts the answer of 20, whose weights are then versions 0, 1 and 2."""
    found = simulate([[1], [2], [20]], 2, workers(4), SimulatedSchedule(2, interrupts=True), 1)
    assert found.versions == ((0,), (0,), (0, 1, 2))
    assert [*found.ends_s] == [3, 6, 20 + 2 + 2]
