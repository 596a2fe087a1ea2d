"""Two sides compared by hand, and the page of results."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.all import BENCHMARKS, Benchmark, rendered, replaced
from benchmarks.engines.compare import compare
from benchmarks.engines.scored import Scored, Text
from moe_trm.errors import MoeTrmError
from routing import RouteRecord

TEXTS = [Text(np.arange(5, dtype=np.int32), np.arange(5) >= 2, prompt) for prompt in (0, 1)]
SAME = np.array([[[0, 1], [2, 3]]] * 4, np.uint8)


def side(logprobs: list[list[float]], routes: list[np.ndarray] | None = None, margin: float = 0.5) -> list[Scored]:
    made = []
    for number, values in enumerate(logprobs):
        experts = SAME if routes is None else routes[number]
        record = RouteRecord(experts, (1, 4), 4)
        made.append(Scored(np.array(values, np.float32), record, np.full((4, 2), margin, np.float32)))
    return made


ROLLOUT = [[np.nan, -1.0, -1.0, -1.0], [np.nan, -1.0, -1.0, -1.0]]


def test_flips_and_differences_are_those_of_the_sampled_tokens() -> None:
    other = SAME.copy()
    other[0] = [[2, 3], [0, 1]]  # a prompt row, which does not count
    other[3, 0] = [1, 0]  # the same set
    other[3, 1] = [0, 3]
    native = side([[0.0, -1.0, -1.0, -2.0], [0.0, -1.0, -1.0, -1.0]], [other, SAME])
    replayed = side([[0.0, -1.0, -1.0, -1.5], [0.0, -1.0, -1.0, -1.0]])
    found = compare(TEXTS, side(ROLLOUT), native, replayed, side(ROLLOUT), local_flips=0.25)
    assert found.num_tokens == 6
    assert found.pooled["layer_flip_rate"].value == pytest.approx(1 / 12)
    assert found.pooled["token_flip_rate"].value == pytest.approx(1 / 6)
    assert found.pooled["overlap_loss"].value == pytest.approx(1 / 24)
    assert found.pooled["native_abs_mean"].value == pytest.approx(1 / 6)
    assert found.pooled["replayed_abs_mean"].value == pytest.approx(0.5 / 6)
    assert found.pooled["routing_abs_mean"].value == pytest.approx(0.5 / 6)
    assert found.pooled["all/native_k3"].value == pytest.approx(np.exp(-1) / 6)
    # One of two prompts has the flip: resampled prompts have it never, once or twice.
    assert (found.pooled["layer_flip_rate"].low, found.pooled["layer_flip_rate"].high) == pytest.approx((0.0, 1 / 6))
    rates = {
        (kind, name): (one.rate.value, one.token_layers)
        for kind, strata in found.strata.items()
        for name, one in strata.items()
    }
    assert rates == {
        ("layer", "1"): (0.0, 6),
        ("layer", "4"): (pytest.approx(1 / 6), 6),
        ("position", "below 8"): (pytest.approx(1 / 12), 12),
        ("router margin", "0.1 and up"): (pytest.approx(1 / 12), 12),
    }
    assert found.strata["layer"]["4"].rate.high == pytest.approx(1 / 3)
    assert (found.local_flips, found.gate_weight_shift) == (0.25, None)


def test_a_side_that_cannot_replay_has_no_figures_of_replay() -> None:
    found = compare(TEXTS, side(ROLLOUT), side(ROLLOUT), None, side(ROLLOUT))
    assert found.pooled["layer_flip_rate"].value == 0.0
    assert not [name for name in found.pooled if "replayed" in name or "reduction" in name or "routing" in name]


def test_log_probs_that_are_not_finite_are_refused() -> None:
    broken = [[0.0, -1.0, -np.inf, -1.0], [0.0, -1.0, -1.0, -1.0]]
    with pytest.raises(MoeTrmError, match="not finite"):
        compare(TEXTS, side(ROLLOUT), side(broken), None, side(ROLLOUT))


MEASURED = {
    "title": "a\nb",
    "command": "python -m benchmarks.x --json /y/z.json --repeats 3",
    "date": "2026-11-21T10:00:00+00:00",
    "cores": 2,
    "cpu": "a core",
    "python": "3.11",
    "torch": "2",
    "rows": [{"k": "one", "v": 0.123456}, {"k": "two", "v": 2}, {"other": 1.0}],
}


def test_a_block_takes_the_place_of_the_old_one_and_nothing_else() -> None:
    one = BENCHMARKS[0]
    page = f"# Results\nwords\n<!-- {one.name} -->\nold\n<!-- end {one.name} -->\nmore words\n"
    new = replaced(page, one, MEASURED)
    assert new.startswith("# Results\nwords\n")
    assert new.endswith("more words\n")
    assert "old" not in new
    assert replaced(new, one, MEASURED) == new
    made = replaced("# Results\n", one, MEASURED)
    assert f"## {one.title}\n" in made
    assert replaced(made, one, MEASURED) == made


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda one: one.name)
def test_every_block_has_its_benchmark(benchmark: Benchmark) -> None:
    assert find_spec(f"benchmarks.{benchmark.module}") is not None


def test_tables_say_command_date_and_machine() -> None:
    text = rendered(MEASURED)
    assert text.startswith("`python -m benchmarks.x --repeats 3`, 2026-11-21, 2 cores, a core, Python 3.11, torch 2.\n")
    assert "| k | v |\n|---|---|\n| one | 0.1235 |\n| two | 2 |\n\n| other |\n|---|\n| 1 |" in text
