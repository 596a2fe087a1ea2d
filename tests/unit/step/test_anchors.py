"""Behaviour and proximal log-probs by every recovery route, on a learner whose log-probs name their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moe_trm.batch.collate import collate
from moe_trm.config.schema import Config, ReplayMode, RolloutConfig
from moe_trm.errors import ConfigError, LearnerError
from moe_trm.learner.protocol import Scores
from moe_trm.step.anchors import Anchors
from moe_trm.step.passes import AnchoredMinibatch, interpolated
from moe_trm.step.proximal_average import ProximalAverage
from moe_trm.step.recipe import recipe
from moe_trm.sync.rounding import Rounding
from moe_trm.types import MicroBatch, MiniBatch, RolloutRecord, TokenBatch, TrainBatch, TrainRow
from routing.record.router_shift import KEEP, RouterScores
from routing.record.sources import Recorded, RouteSource
from tests.unit.doubles import StandInLearner
from tests.unit.records import make_record


class FakeLearner(StandInLearner):
    """Scores every token as minus the version of the weights it is asked to use."""

    def __init__(self) -> None:
        self.version, self.held, self.passes, self.num_bytes = 0, dict[str, float](), list[str | None](), 8
        self.saved = set[str]()

    def snapshot(self, name: str, *, saved: bool = False, rounding: Rounding | None = None) -> int:
        assert rounding is None
        self.held[name] = self.version
        if saved:
            self.saved.add(name)
        return self.num_bytes

    def average(self, name: str, share: float) -> int:
        old = self.held.get(name, self.version)
        self.held[name] = old + share * (self.version - old)
        return self.num_bytes

    def forget(self, name: str) -> None:
        del self.held[name]

    def scored(
        self, batches: Sequence[TokenBatch], sources: Sequence[RouteSource], weights: str | None
    ) -> list[Scores]:
        self.passes.append(weights)
        version = self.version if weights is None else self.held[weights]
        recorded = Recorded({0: torch.zeros(1, 2, dtype=torch.int64)})
        return [Scores(torch.where(batch.mask, -1.0 - version, 0.0), recorded=recorded) for batch in batches]


def config(*, eta: int = 2, behavior: str = "snapshot", **sections: Any) -> Config:
    pipeline = {"mode": "async", "max_staleness": eta, "behavior": behavior} if eta else {}
    return Config.model_validate({"model": {"checkpoint": "unused"}, "pipeline": pipeline, **sections})


def batch_of(step: int, *versions: Sequence[int]) -> TrainBatch:
    """A step of two minibatches that both hold a row for each list of token versions."""
    rows = [TrainRow(spanning(i, own)) for i, own in enumerate(versions)]
    mini = MiniBatch((MicroBatch(tuple(rows)),), len(rows), sum(map(len, versions)))
    return TrainBatch(step, (mini, mini), {}, tuple(sorted({v for own in versions for v in own})))


def spanning(sample_id: int, versions: Sequence[int]) -> RolloutRecord:
    return replace(make_record(sample_id=sample_id, num_sampled=len(versions)), versions=np.array(versions, np.int32))


def at(step: int, learner: FakeLearner, anchors: Anchors, batch: TrainBatch) -> list[AnchoredMinibatch]:
    learner.version, learner.passes = step - 1, []
    return anchors.score(learner, batch)


def test_each_token_gets_its_behaviour_from_the_weights_that_sampled_it() -> None:
    learner, anchors = FakeLearner(), Anchors(config(), "R3", reads_minibatch=False)
    for step in (1, 2):
        at(step, learner, anchors, batch_of(step, [step - 1] * 2))
    parts = at(3, learner, anchors, batch_of(3, [0, 0, 1], [1, 2, 2]))
    assert learner.passes == [None, "behavior-0", "behavior-1"]
    for part in parts:
        current = torch.where(part.batches[0].mask, -9.0, 0.0)
        ratios = part.ratios(0, current)
        mask = ratios.mask
        assert torch.equal(ratios.lag[mask], (part.batches[0].versions - 2)[mask].float())
        assert (ratios.update[mask] == -6).all()
        engine = -1.0 - part.batches[0].versions - part.batches[0].rollout_logprobs
        torch.testing.assert_close(ratios.engine[mask], engine[mask])
    at(4, learner, anchors, batch_of(4, [3]))
    assert list(learner.held) == ["behavior-1", "behavior-2", "behavior-3"]


def test_snapshots_beyond_their_budget_are_refused() -> None:
    learner = FakeLearner()
    learner.num_bytes = 30 * 2**30
    with pytest.raises(ConfigError, match=r"90 GiB"):
        at(1, learner, Anchors(config(), "R3", reads_minibatch=False), batch_of(1, [0]))


def test_merged_keeps_engine_and_lag_in_one() -> None:
    learner = FakeLearner()
    [part, _] = at(3, learner, Anchors(config(behavior="merged"), "R3", reads_minibatch=False), batch_of(3, [0, 2]))
    assert learner.passes == [None]
    assert not learner.held
    ratios = part.ratios(0, torch.where(part.batches[0].mask, -5.0, 0.0))
    assert not ratios.split
    torch.testing.assert_close(ratios.merged[ratios.mask], (-3.0 - part.batches[0].rollout_logprobs)[ratios.mask])


@pytest.mark.parametrize("behavior", ["interpolate", "bypass"])
def test_no_pass_is_made_where_the_anchor_needs_none(behavior: str) -> None:
    learner = FakeLearner()
    [part, _] = at(3, learner, Anchors(config(behavior=behavior), "R3", reads_minibatch=False), batch_of(3, [0, 2]))
    assert learner.passes == []
    assert not part.scored
    current = torch.where(part.batches[0].mask, -5.0, 0.0)
    ratios, batch = part.ratios(0, current), part.batches[0]
    distance = (-5.0 - batch.rollout_logprobs)[batch.mask]
    torch.testing.assert_close(ratios.total[batch.mask], distance)
    share = torch.tensor([1 / 3, 1.0]) if behavior == "interpolate" else torch.ones(2)
    torch.testing.assert_close(ratios.update[batch.mask], share * distance)


def test_interpolation_weights_follow_the_age() -> None:
    """A-3PO at v_theta = 7, whose proximal version is 6: alpha 0, 0, 0.5, 0.75 for samples of versions 7, 6, 5, 3."""
    batch = collate(MicroBatch((TrainRow(spanning(0, [7, 6, 5, 3])),)), keep_mask=False)
    current = batch.rollout_logprobs + 1
    moved = (interpolated(batch, current, 6) - batch.rollout_logprobs)[batch.mask]
    torch.testing.assert_close(moved, torch.tensor([0.0, 0.0, 0.5, 0.75]))


def test_the_first_update_is_its_own_anchor_pass_where_that_is_provable() -> None:
    def skipped(
        mode: ReplayMode = "R3", reads_minibatch: bool = False, score_all: bool = False, **sections: Any
    ) -> bool:
        anchors = Anchors(config(eta=0, **sections), mode, reads_minibatch=reads_minibatch)
        parts = anchors.score(FakeLearner(), batch_of(1, [0]), score_all=score_all)
        assert parts[1].scored
        return not parts[0].scored

    assert skipped()
    assert skipped("none")
    assert not skipped("R2")
    assert not skipped(reads_minibatch=True)
    assert not skipped(score_all=True)
    assert not skipped(record={"bundle": "somewhere"})
    assert not skipped(learner={"epochs": 2, "minibatches": 2})
    [part, _] = at(1, FakeLearner(), Anchors(config(eta=0), "R3", reads_minibatch=False), batch_of(1, [0]))
    current = torch.where(part.batches[0].mask, -5.0, 0.0).requires_grad_()
    ratios = part.ratios(0, current)
    assert not ratios.update.any()
    assert not ratios.lag.any()
    ratios.update.sum().backward()
    assert current.grad is not None
    assert current.grad.sum() == part.batches[0].mask.sum()


def test_rules_may_read_only_what_is_known() -> None:
    def of(behavior: str, **thresholds: Any) -> Config:
        return config(
            behavior=behavior,
            correction={"rules": [{"name": "icepop", "thresholds": thresholds}]},
            loss={"name": "reinforce"} if thresholds.get("ratio") == "total" else {},
        )

    recipe(of("snapshot"))
    recipe(of("merged", ratio="merged"))
    for behavior in ("merged", "interpolate", "bypass"):
        with pytest.raises(ConfigError, match="icepop reads a ratio that is not known"):
            recipe(of(behavior))
        recipe(of(behavior, ratio="total"))
    with pytest.raises(ConfigError, match="whole minibatch"):
        recipe(config(behavior="interpolate", loss={"name": "kl_cov"}))


def test_on_a_recording_the_weights_that_sampled_outlast_a_resumption() -> None:
    recorded = config(rollout={"engine": "bundle", "bundle": "unused"})
    learner, before = FakeLearner(), Anchors(recorded, "R3", reads_minibatch=False)
    for step in (1, 2):
        at(step, learner, before, batch_of(step, [0]))
    assert learner.saved == {"behavior-0", "behavior-1"}
    after = Anchors(recorded, "R3", reads_minibatch=False)
    after.restore(before.state())
    at(3, learner, after, batch_of(3, [0, 1]))
    assert learner.passes == [None, "behavior-0", "behavior-1"]
    at(4, learner, after, batch_of(4, [1]))
    assert list(learner.held) == ["behavior-1", "behavior-2", "behavior-3"]


def test_weights_that_a_resumed_run_does_not_have_are_told() -> None:
    live = Anchors(config(), "R3", reads_minibatch=False)
    learner = FakeLearner()
    at(1, learner, live, batch_of(1, [0]))
    assert not learner.saved
    assert live.state() == []
    with pytest.raises(LearnerError, match="not in the checkpoint"):
        at(3, learner, Anchors(config(), "R3", reads_minibatch=False), batch_of(3, [0, 2]))


def test_only_versions_that_were_pushed_are_kept() -> None:
    """Every second one, and the one that a resumed run began with; those of a recording are all kept."""

    def kept(anchors: Anchors, first: int) -> list[str]:
        learner = FakeLearner()
        for step in range(first + 1, first + 6):
            at(step, learner, anchors, batch_of(step, [step - 1]))
        return list(learner.held)

    live = config(eta=3)
    every = live.model_copy(update={"pipeline": live.pipeline.model_copy(update={"push_every": 2})})
    assert kept(Anchors(every, "R3", reads_minibatch=False), 0) == ["behavior-2", "behavior-4"]
    assert kept(Anchors(every, "R3", reads_minibatch=False, first=3), 3) == ["behavior-4", "behavior-6"]
    resumed = FakeLearner()
    at(4, resumed, Anchors(every, "R3", reads_minibatch=False, first=3), batch_of(4, [3]))
    assert list(resumed.held) == ["behavior-3"]
    recorded = every.model_copy(update={"rollout": RolloutConfig(engine="bundle", bundle="unused")})
    assert kept(Anchors(recorded, "R3", reads_minibatch=False), 0) == [
        f"behavior-{version}" for version in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("behavior", ["snapshot", "merged"])
@pytest.mark.parametrize("eta", [0, 2])
def test_an_averaged_anchor_is_the_proximal_policy_and_not_the_behaviour(eta: int, behavior: str) -> None:
    """At decay 0.5 the average of versions 0, 1, 2 is (0 / 4 + 1 / 2 + 2) / 1.75."""
    average = ProximalAverage(0.5)
    learner, anchors = (
        FakeLearner(),
        Anchors(config(eta=eta, behavior=behavior), "R3", reads_minibatch=False, average=average),
    )
    for step in (1, 2):
        at(step, learner, anchors, batch_of(step, [step - 1]))
    for part in at(3, learner, anchors, batch_of(3, [0, 2] if eta else [2, 2])):
        assert not part.scored
        mask, batch = part.batches[0].mask, part.batches[0]
        ratios = part.ratios(0, torch.where(mask, -9.0, 0.0))
        torch.testing.assert_close(ratios.update[mask], torch.full((2,), -9.0 + 1 + 2.5 / 1.75))
        torch.testing.assert_close(ratios.total[mask], (-9.0 - batch.rollout_logprobs)[mask])
        if eta and behavior == "merged":
            assert not ratios.split
        else:
            torch.testing.assert_close(ratios.lag[mask], batch.versions[mask] - 2.5 / 1.75)
            torch.testing.assert_close(ratios.engine[mask], (-1.0 - batch.versions - batch.rollout_logprobs)[mask])


def test_an_average_goes_on_after_a_resumption() -> None:
    before, after = ProximalAverage(0.7), ProximalAverage(0.7)
    one, two = FakeLearner(), FakeLearner()
    for version in range(3):
        one.version = version
        before.absorb(one)
    two.held["proximal"] = one.held["proximal"]
    after.restore(before.state())
    for learner, average in ((one, before), (two, after)):
        learner.version = 3
        average.absorb(learner)
    assert one.held["proximal"] == two.held["proximal"]


def test_parts_of_a_step_have_the_anchors_of_its_start() -> None:
    """The second minibatch arrives when the first has moved the weights; whatever else is kept is kept once."""
    streamed: dict[str, Any] = {"rollout": {"prompts_per_step": 4}, "learner": {"minibatches": 2}}
    for behavior, eta in (("snapshot", 2), ("merged", 2), ("snapshot", 0)):
        settings = config(behavior=behavior, eta=eta, **streamed)
        streaming = settings.model_copy(update={"pipeline": settings.pipeline.model_copy(update={"stream": True})})
        old = [0, 2] if eta else [2]
        learner, anchors = FakeLearner(), Anchors(streaming, "R3", reads_minibatch=False)
        for step in (1, 2):
            at(step, learner, anchors, batch_of(step, [step - 1]))
        batch = batch_of(3, old)
        first, second = (replace(batch, mini_batches=(mini,)) for mini in batch.mini_batches)
        [one] = at(3, learner, anchors, first)
        learner.version = 77  # as if the weights had moved within the step
        [two] = anchors.score(learner, second, moved=True)
        current = torch.where(two.batches[0].mask, -9.0, 0.0)
        [whole, _] = at(3, FakeLearner(), Anchors(config(eta=0), "R3", reads_minibatch=True), batch)
        assert not one.scores or torch.equal(one.scores[0].logprobs, whole.scores[0].logprobs)
        assert torch.equal(two.scores[0].logprobs, whole.scores[0].logprobs)
        assert torch.equal(one.ratios(0, current).total, two.ratios(0, current).total)
        if behavior == "snapshot" and eta:
            assert one.behavior is not None
            assert two.behavior is not None
            assert torch.equal(one.behavior[0], two.behavior[0])


def test_the_routers_of_the_anchor_are_what_updates_compare_with() -> None:
    class Watched(FakeLearner):
        def score(self, batches: Any, sources: Any, **options: Any) -> list[Scores]:
            assert all(source.scores is KEEP for source in sources)
            found = super().score(batches, sources, **options)
            return [replace(one, router=RouterScores({i: torch.zeros(1)})) for i, one in enumerate(found)]

    for mode in ("R2", "R3"):
        learner = Watched()
        parts = at(1, learner, Anchors(config(eta=0), mode, reads_minibatch=False, watches=True), batch_of(1, [0]))
        assert learner.passes == [None]
        for part in parts:
            assert part.scored
            sources = zip(part.sources, part.scores, strict=True)
            assert all(source.scores is scores.router for source, scores in sources)
        assert parts[0].sources[0].scores != parts[1].sources[0].scores
    with pytest.raises(AssertionError):
        at(1, Watched(), Anchors(config(eta=0), "none", reads_minibatch=False, watches=True), batch_of(1, [0]))
