"""Samples of several rows in the loss: a sample weighs the same however many rows it is, and rules judge each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_trm.batch.plan import plan_step
from moe_trm.batch.train_rows import train_rows
from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Scores
from moe_trm.losses.aggregate import Aggregation
from moe_trm.recording.scores import ScoredUpdate, ScoresReader, write_scores
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.step.score_recorder import _scored
from moe_trm.tools.whatif.offline import RecordedLearner
from moe_trm.types import TrainRow
from routing.layout.row_ids import ROW_STEP
from routing.record.sources import Native
from tests.unit.advantages import valued
from tests.unit.records import make_record, split_record
from tests.unit.step.shared_minibatch import anchor_logprobs, config, current_logprobs, outcome, rows

AGGREGATIONS = get_args(Aggregation)
METHODS: dict[str, dict[str, Any]] = {
    "ppo_clip": {},
    "reinforce, kept and dropped tokens": {
        "loss": {"name": "reinforce"},
        "correction": {"rules": [{"name": "icepop", "thresholds": {"low": 0.9, "high": 1.2}}]},
    },
    "weights after a tool": {
        "correction": {"rules": [{"name": "token_tis", "thresholds": {"tokens": "post_tool", "cap": 1.05}}]},
    },
    "stale": {
        "pipeline": {"mode": "async", "behavior": "merged"},
        "correction": {"rules": [{"name": "token_tis", "thresholds": {"ratio": "merged", "cap": 1.1}}]},
    },
    "over the whole minibatch": {
        "correction": {"rules": [{"name": "m2po", "thresholds": {"budget": 0.02}}]},
        "loss": {"name": "unclipped"},
    },
    "a KL and the entropy": {"kl": {"coef": 0.3}, "loss": {"entropy_coef": 0.1}},
}


def turned(given: Sequence[TrainRow]) -> list[TrainRow]:
    """The rows with two turns each: the second half of a sample is of turn 1."""
    found = []
    for row in given:
        record = row.record
        places = np.flatnonzero(record.sampled)
        turns = record.turn_ids.copy()
        turns[places[len(places) // 2] :] = 1
        found.append(replace(row, record=replace(record, turn_ids=turns).bound()))
    return found


def cut(given: Sequence[TrainRow]) -> list[TrainRow]:
    """Every second sample as two or three rows with the same tokens, the others as they are."""
    found = []
    for number, row in enumerate(given):
        count = row.record.num_sampled
        sizes = [count] if number % 2 == 0 else [1, 1, count - 2] if number % 4 == 1 else [count - 1, 1]
        sample = split_record(row.record, sizes)
        found += train_rows(sample)
    return found


def of_samples(gradients: dict[int, Tensor]) -> dict[int, Tensor]:
    """Gradients by sample, its rows one after the other."""
    found: dict[int, list[Tensor]] = {}
    for number in sorted(gradients):
        found.setdefault(number % ROW_STEP, []).append(gradients[number])
    return {number: torch.cat(parts) for number, parts in found.items()}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_sample_weighs_the_same_as_one_row_and_as_many(name: str, aggregation: str, ranks: int) -> None:
    """Token by token the same gradient, whatever ranks and micro-batches hold the rows of a sample."""
    method = METHODS[name]
    settings = config(**{**method, "loss": {**method.get("loss", {}), "aggregation": aggregation}}, **with_turns())
    whole = outcome(settings, ranks=1, micro_batch_rows=100, given=turned(rows()))
    several = outcome(settings, ranks=ranks, micro_batch_rows=2, given=cut(turned(rows())))
    assert len(several["gradients"]) > len(whole["gradients"])
    assert several["loss"] == pytest.approx(whole["loss"], rel=1e-5, abs=1e-7)
    again = of_samples(several["gradients"])
    assert again.keys() == whole["gradients"].keys()
    for number, gradient in whole["gradients"].items():
        torch.testing.assert_close(again[number], gradient, rtol=1e-4, atol=1e-7)
        assert torch.equal(again[number] != 0, gradient != 0)
    assert any(float(gradient.abs().sum()) > 0 for gradient in again.values())
    assert "turns/total_k3/1" not in several["metrics"]
    ratio = "merged" if name == "stale" else "engine"
    for metric in (f"turns/{ratio}_k3/0", f"turns/{ratio}_k3/1"):
        assert several["metrics"][metric] == pytest.approx(whole["metrics"][metric], rel=1e-4)


TURNS = [
    {"name": "trm_avg", "thresholds": {"scope": "turn", "mean_kl": 0.02}},
    {"name": "geometric_mask", "thresholds": {"scope": "turn", "ratio": "merged", "low": 0.9, "high": 1.1}},
]


WEIGHED = {"name": "seq_tis", "thresholds": {"scope": "turn", "ratio": "merged", "cap": 1.2}}


@pytest.mark.parametrize(("ranks", "packed"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize(
    "method",
    [
        {"correction": {"rules": TURNS}, "loss": {"name": "unclipped"}},
        {"correction": {"rules": [*TURNS, METHODS["over the whole minibatch"]["correction"]["rules"][0]]}},
        {"correction": {"rules": TURNS}, "pipeline": {"mode": "async", "behavior": "merged"}},
        {"correction": {"rules": [TURNS[0], WEIGHED], "batch_normalize": "token"}},
    ],
    ids=["fresh", "beside a rule on the minibatch", "stale", "weights with mean 1"],
)
def test_rules_by_turn_find_turns_in_one_row_and_in_many(method: dict[str, Any], ranks: int, packed: bool) -> None:
    """A conversation as one row, or each turn as a row of its own: the same tokens and the same turns stay."""
    settings = config(**method, **with_turns())
    given, cut_at_turns = turned(rows()), list[TrainRow]()
    for row in given:
        half = row.record.num_sampled // 2
        cut_at_turns += train_rows(split_record(row.record, [half, row.record.num_sampled - half]))
    whole = outcome(settings, ranks=1, micro_batch_rows=100, given=given)
    several = outcome(settings, ranks=ranks, micro_batch_rows=2, given=cut_at_turns, packed=packed)
    again = of_samples(several["gradients"])
    for number, gradient in whole["gradients"].items():
        torch.testing.assert_close(again[number], gradient, rtol=1e-4, atol=1e-7)
    partly = [gradient for gradient in whole["gradients"].values() if 0 < (gradient != 0).sum() < len(gradient)]
    assert partly, "no conversation lost a part"
    for share in ("kept_fraction", "kept_turn_fraction", "kept_turn_fraction/1"):
        name = f"correction/trm_avg/{share}"
        assert 0 < several["metrics"][name] < 1
        assert several["metrics"][name] == pytest.approx(whole["metrics"][name])


def with_turns() -> dict[str, Any]:
    return {"rollout": {"agent": "mine.py:run"}, "agent": {"rows": "trajectory"}}


def test_the_mean_over_a_sample_is_over_all_its_rows_by_hand() -> None:
    """A sample of 1 + 3 tokens and one of 2: each has half of the mean, whatever its rows are."""
    one = split_record(make_record(sample_id=0, num_sampled=4), [1, 3])
    other = make_record(sample_id=1, num_sampled=2, reward=0.0)
    given = [*train_rows(one), *train_rows(other)]
    settings = config(loss={"name": "reinforce", "aggregation": "seq-mean-token-mean"}, **with_turns())
    found = outcome(settings, ranks=2, micro_batch_rows=1, given=given)
    # d/dlogp of -A logp / T_i / N.
    expected = {0: [-1 / 4 / 2], ROW_STEP: [-1 / 4 / 2] * 3, 1: [0.5 / 2 / 2] * 2}
    assert found["gradients"].keys() == expected.keys()
    for number, values in expected.items():
        assert found["gradients"][number].tolist() == pytest.approx(values)


def test_a_rule_on_sequences_judges_each_row_and_changes_no_denominator() -> None:
    """One bad row among good ones of its sample: it is dropped alone, and all others weigh as before."""
    given = cut(turned(rows()))
    plain = outcome(config(**with_turns()), ranks=1, micro_batch_rows=4, given=given)
    rule = {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 0.1}}]}
    ruled = outcome(config(correction=rule, **with_turns()), ranks=2, micro_batch_rows=3, given=given)
    dropped = {number for number, gradient in ruled["gradients"].items() if not gradient.any()}
    mixed = {number % ROW_STEP for number in dropped} & {
        number % ROW_STEP for number in {*ruled["gradients"]} - dropped
    }
    assert mixed, "a sample with a dropped and a kept row"
    for number, gradient in ruled["gradients"].items():
        expected = torch.zeros_like(gradient) if number in dropped else plain["gradients"][number]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)


def test_a_recorded_update_of_several_rows_is_judged_with_their_denominators(tmp_path: Any) -> None:
    """Micro-batches with and without cut samples in one file, of two ranks."""
    shares = plan_step(cut(rows()), seed=0, step=1, minibatches=1, data_size=2, micro_batch_rows=1)
    kept = []
    for rank, [mini] in enumerate(shares):
        batches = [valued(micro.rows) for micro in mini.micro_batches]
        kept += batches
        scores = [Scores(anchor_logprobs(batch)) for batch in batches]
        part = AnchoredMinibatch(mini, batches, scores, [Native()] * len(batches))
        seen = {index: Scores(current_logprobs(batch)) for index, batch in enumerate(batches)}
        write_scores(tmp_path, 1, [_scored(part, seen)], data_rank=rank, data_size=2)
    assert len({batch.sample_tokens is None for batch in kept}) == 2
    [update] = ScoresReader(tmp_path).read(1)
    assert update.num_sequences == len(rows())
    lengths = {row.record.sample_id: row.record.num_sampled for row in rows()}
    held = RecordedLearner().hold(update, needs_anchors=False)
    for scored, batch, micro in zip(update.batches, held.batches, held.mini.micro_batches, strict=True):
        assert scored.sample_tokens is not None
        assert batch.sample_tokens is scored.sample_tokens
        own = [lengths[row.record.sample_id] for row in micro.rows]
        assert scored.sample_tokens.tolist()[: len(own)] == own
        assert [row.record.row_id for row in micro.rows] == [n for n in scored.sample_ids.tolist() if n >= 0]


def test_what_whole_samples_wrote_has_no_denominators(tmp_path: Any) -> None:
    [[mini]] = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=5)
    batches = [valued(micro.rows) for micro in mini.micro_batches]
    part = AnchoredMinibatch(
        mini, batches, [Scores(anchor_logprobs(batch)) for batch in batches], [Native()] * len(batches)
    )
    update: ScoredUpdate = _scored(part, {i: Scores(current_logprobs(batch)) for i, batch in enumerate(batches)})
    write_scores(tmp_path, 1, [update], data_rank=0, data_size=1)
    assert all(batch.sample_tokens is None for batch in ScoresReader(tmp_path).read(1)[0].batches)


def test_runs_of_single_answers_have_no_figures_by_turn() -> None:
    found = outcome(Config.model_validate({"model": {"checkpoint": "none"}}), ranks=1, micro_batch_rows=4)
    assert not [name for name in found["metrics"] if name.startswith("turns/")]
