"""The simulation knows every schedule: by hand, and held to the real controller over servers in virtual time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.config.schema import Config
from moe_trm.tools.plan.modes import Mode
from moe_trm.tools.plan.provision import BUSY, LARGEST, provision
from moe_trm.tools.plan.simulate import SimulatedSchedule, SimulatedServers, Timeline, simulate
from tests.unit.rollout.simulated_fleet import SimulatedFleet, train
from tests.unit.virtual_time import run

STEPS, PROMPTS, SIZE = 9, 4, 2
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, pushed every third step": {"push_every": 3},
    "sync, streamed": {"stream": True},
    "one step": {"mode": "one_step"},
    "one step, pushed every second step": {"mode": "one_step", "push_every": 2},
    "periodic": {"mode": "periodic", "push_every": 3},
    "periodic, streamed": {"mode": "periodic", "push_every": 2, "stream": True},
    "async": {"mode": "async"},
    "async, pushed every second step": {"mode": "async", "push_every": 2, "max_staleness": 3},
    "async, rolling": {"mode": "async", "rolling_push": True},
    "everything": {"mode": "async", "push_every": 2, "rolling_push": True, "stream": True},
}


def workers(number: int, servers: int = 1, **options: float) -> SimulatedServers:
    """Requests that never slow each other down: one token per second each."""
    return SimulatedServers(servers, number, lambda _n: 1.0, **options)


def test_weights_go_out_every_second_step_and_age_counts_steps() -> None:
    """In turn: 5 to sample, 10 to train, 1 to push after every second step. Versions 0 0 2 2."""
    found = simulate([[5, 3]] * 4, 10, workers(2, push_s=1), SimulatedSchedule(1, push_every=2, in_turn=True))
    assert [*found.ends_s] == [15, 30, 46, 61]
    assert found.versions == ((0,), (0,), (2,), (2,))


def test_a_period_is_sampled_together_and_trained_as_it_is_there() -> None:
    """Two batches of 6 at a time from one server of one slot: 12 + 4 for the second, which trains when it is there."""
    found = simulate([[6]] * 4, 4, workers(1, push_s=1), SimulatedSchedule(1, push_every=2))
    assert [*found.ends_s] == [10, 16, 27, 33]
    assert found.versions == ((0,), (0,), (2,), (2,))


def test_half_a_batch_trains_while_the_other_half_is_sampled() -> None:
    """2 + 5 for the first half; the second is there at 9, and ends at 14, not at 9 + 10."""
    found = simulate([[2, 9]], 10, workers(2), SimulatedSchedule(0, in_turn=True, parts=2))
    assert [*found.ends_s] == [14]
    assert [*simulate([[2, 9]], 10, workers(2), SimulatedSchedule(0, in_turn=True)).ends_s] == [19]


def test_servers_that_load_in_turn_leave_others_at_work() -> None:
    """Two servers of one slot. The push at 14 finds both at work until 20.

    In turn, the first loads from 20 to 25, and the second goes on with version 0 until 30. At once, both have version 1
    at 25.
    """
    at_once = simulate([[10, 10]] * 3, 4, workers(1, servers=2, push_s=5), SimulatedSchedule(2))
    rolling = simulate([[10, 10]] * 3, 4, workers(1, servers=2, push_s=5), SimulatedSchedule(2, rolling=True))
    assert at_once.versions == ((0,), (0,), (1,))
    assert rolling.versions == ((0,), (0,), (0, 1))
    assert [*at_once.ends_s] == [14, 24, 25 + 10 + 4]
    assert [*rolling.ends_s] == [14, 24, 25 + 10 + 4]


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_simulation_agrees_with_the_controller(name: str, servers: int) -> None:
    compare(SCHEDULES[name], servers, [7.31] * STEPS, random.Random(len(name)))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 3),
    st.integers(1, 40).map(lambda tenths: tenths / 2 + 0.0137),
    st.integers(0, 2**31),
)
def test_they_agree_whatever_training_and_answers_take(name: str, servers: int, train_s: float, seed: int) -> None:
    compare(SCHEDULES[name], servers, [train_s] * STEPS, random.Random(seed))


def compare(pipeline: dict[str, Any], servers: int, train_s: list[float], chance: random.Random) -> None:
    """Which versions sample each step, and when each ends, in both."""
    config = Config.model_validate(
        {
            "model": {"checkpoint": "unused"},
            "rollout": {"prompts_per_step": PROMPTS, "group_size": SIZE, "concurrency": 1000},
            "learner": {"minibatches": 2},
            "pipeline": pipeline,
            "batch": {"refill_limit": 1},
            "train": {"steps": STEPS},
        }
    )
    per_step = PROMPTS * SIZE
    lengths = [chance.randint(1, 30) for _ in range(STEPS * per_step)]
    engine = SimulatedFleet(
        servers, rolling=config.pipeline.rolling_push, push_s=0.77, lengths=lambda sample_id: lengths[sample_id]
    )
    real = run(train(config, engine, train_s))
    batches = [lengths[i : i + per_step] for i in range(0, len(lengths), per_step)]
    fleet = workers(1000, servers=servers, push_s=0.77)
    found = simulate(
        batches, train_s[0], fleet, Mode.of(config.pipeline, config.learner.minibatches).schedule(sends=False)
    )
    # The controller's run begins with a push, which the simulation does not.
    first_push = 0.77 * (servers if config.pipeline.rolling_push else 1)
    assert found.versions == tuple(batch.versions for batch in real.steps)
    assert [at + first_push for at in found.ends_s] == pytest.approx(real.ends_s)


def test_the_rule_of_provision_by_hand() -> None:
    """1200 tokens a step, 100 tokens/s of a server. In 4 s that is 3 servers; a push of 1 s leaves 3 s: 4 servers."""

    def of(slack: int, push_s: float) -> tuple[int | None, list[int]]:
        asked: list[int] = []

        def simulated(servers: int) -> Timeline:
            asked.append(servers)
            return simulate([[3, 3]] * 6, 4, workers(servers), SimulatedSchedule(slack))

        return provision(1200, 100, 4.0, push_s, slack, simulated).servers, asked

    assert of(1, 0.0) == (3, [2, 3])
    assert of(1, 1.0) == (4, [3, 4])
    assert of(2, 1.0) == (3, [2, 3])
    assert of(0, 0.0) == (None, [])
    assert of(1, 4.0) == (None, [])
    assert provision(1200 * LARGEST, 100, 4.0, 0.0, 1, lambda servers: pytest.fail("too many")).servers == 3 * LARGEST


@pytest.mark.parametrize("answers", [4, 12])
def test_with_answers_of_one_length_the_rule_is_what_the_simulation_finds(answers: int) -> None:
    """Ten slots of one token per second each; answers of 10 tokens; training takes 20 s, or what two batches take."""

    def simulated(servers: int) -> Timeline:
        return simulate(
            [[10] * answers * 10] * 12, 20.0, workers(10, servers=servers), SimulatedSchedule(2, interrupts=True)
        )

    found = provision(answers * 100, 10, 20.0, 0.0, 2, simulated)
    assert found.servers == max(1, answers // 2)
    assert found.holds
    if found.servers > 2:
        assert found.idle_below is not None
        assert found.idle_below > BUSY
