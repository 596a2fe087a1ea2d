"""Digests of copies: any changed bit and any two that change places show; errors name the ranks without company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.learner import replicas
from moe_trm.learner.replicas import agreed_norm, compare_replicas, digest
from moe_trm.step.cadence import Replicas
from tests.unit.doubles import StandInLearner

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_changes_the_digest_and_so_do_two_numbers_that_change_places(dtype: torch.dtype) -> None:
    values = (torch.arange(12).view(3, 4) + 1).to(dtype)
    same = int(digest(values))
    assert int(digest(values.clone())) == int(digest(values.t().contiguous().t())) == same
    for place in range(12):
        changed = values.clone()
        changed.view(-1)[place : place + 1].view(torch.uint8)[0] ^= 1
        assert int(digest(changed)) != same, place
    exchanged = values.clone()
    exchanged[0, 0], exchanged[2, 1] = values[2, 1], values[0, 0]
    assert int(digest(exchanged)) != same


@given(st.lists(st.floats(width=32), max_size=9))
def test_a_digest_does_not_depend_on_how_much_is_taken_at_once(values: list[float]) -> None:
    tensor = torch.tensor(values)
    bits = tensor.view(torch.int32).tolist()
    by_hand = sum((2 * place + 1) * number for place, number in enumerate(bits))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_ELEMENTS_AT_ONCE", 2)
        assert int(digest(tensor)) == by_hand
    assert int(digest(tensor)) == by_hand


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({0: 7, 1: 7, 2: 8}, "rank 2"),
        ({0: 8, 4: 7, 5: 7, 6: 9}, "ranks 0, 4, 5, 6"),
        ({0: 8, 4: 7, 5: 7, 6: 7}, "rank 0"),
        ({3: 1, 5: 2}, "ranks 3, 5"),
    ],
)
def test_the_ranks_that_most_others_contradict_are_named(values: dict[int, int], named: str) -> None:
    error = replicas._fault("layers.0.weight", values, "1 of 9 tensors differ")
    assert f"(layers.0.weight, {named})" in str(error)
    assert not error.may_pass


def test_a_rank_alone_has_nothing_to_compare() -> None:
    compare_replicas([("a", torch.zeros(2))], torch.device("cpu"))
    assert agreed_norm(1.5, torch.device("cpu")) == 1.5


class Counting(StandInLearner):
    def __init__(self) -> None:
        self.checks = 0

    def check_replicas(self) -> None:
        self.checks += 1


@pytest.mark.parametrize(("every", "due"), [(0, [0]), (1, list(range(12))), (5, [0, 1, 2, 5, 10])])
def test_they_are_compared_after_the_load_and_with_the_pushes_that_are_proved(every: int, due: list[int]) -> None:
    learner, comparisons = Counting(), Replicas(every)
    checks = []
    for _ in range(12):
        comparisons.check(learner)
        checks.append(learner.checks)
    assert [number for number in range(12) if checks[number] > (checks[number - 1] if number else 0)] == due
