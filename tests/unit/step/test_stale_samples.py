"""Stale samples: a coefficient is the whole ratio to the rollout, in every pipeline mode that knows one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_trm import corrections, diagnostics
from moe_trm.config.schema import Config
from moe_trm.corrections import Evidence
from moe_trm.errors import ConfigError
from moe_trm.learner.protocol import Scores
from moe_trm.ratios import LogRatios
from moe_trm.recording.scores import ScoresReader
from moe_trm.step.minibatch import gather_minibatch
from moe_trm.step.objective import Objective
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.step.recipe import recipe
from moe_trm.step.score_recorder import ScoreRecorder
from moe_trm.tools.whatif.judge import Candidate, judge
from moe_trm.types import MicroBatch, MiniBatch, TrainRow
from routing.record.sources import Native
from tests.unit.advantages import valued
from tests.unit.doubles import StandInLearner
from tests.unit.records import make_record

ROLLOUT, PROXIMAL = 0.5, 0.8
"""Probabilities of every token: at rollout, and under the weights at the step's start; behaviour is as the rollout."""


class OneRank(StandInLearner):
    """Gathers and reduces for itself alone."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values


def config(behavior: str | None, **sections: Any) -> Config:
    pipeline = {"mode": "async", "behavior": behavior} if behavior else {}
    return Config.model_validate({"model": {"checkpoint": "none"}, "pipeline": pipeline, **sections})


def stale(settings: Config) -> AnchoredMinibatch:
    """One row of age 1."""
    rows = (TrainRow(make_record(num_sampled=4, version=0)),)
    batch = valued(rows)
    rollout = torch.where(batch.mask, math.log(ROLLOUT), 0.0)
    batch = replace(batch, rollout_logprobs=rollout)
    recovery = settings.pipeline.recovery
    anchor = rollout if recovery in ("interpolate", "bypass") else torch.where(batch.mask, math.log(PROXIMAL), 0.0)
    return AnchoredMinibatch(
        MiniBatch((MicroBatch(rows),), 1, 4),
        [batch],
        [Scores(anchor)],
        [Native()],
        behavior=[rollout] if recovery == "snapshot" else None,
        recovery=recovery,
        version=1,
    )


def coefficient(settings: Config) -> float:
    """- dLoss / dlog-prob of each token times the number of tokens, at the weights of the step's start."""
    part, objective = stale(settings), Objective(settings)
    current = torch.where(part.batches[0].mask, math.log(PROXIMAL), 0.0).requires_grad_()
    objective.bind(part, OneRank(), first=True)(0, Scores(current)).backward()
    assert current.grad is not None
    [value] = (-4 * current.grad[part.batches[0].mask]).unique().tolist()
    return float(value)


@pytest.mark.parametrize("behavior", ["snapshot", "merged", None])
@pytest.mark.parametrize("preset", ["decoupled_token_is", "decoupled_token_icepop"])
def test_decoupled_presets_weigh_by_proximal_over_rollout(behavior: str | None, preset: str) -> None:
    assert coefficient(config(behavior, correction={"preset": preset})) == pytest.approx(1.6, rel=1e-6)


@pytest.mark.parametrize("behavior", ["snapshot", "merged"])
def test_decoupled_rows_are_weighed_by_the_product(behavior: str) -> None:
    assert coefficient(config(behavior, correction={"preset": "decoupled_seq_is"})) == pytest.approx(2.0, rel=1e-6)


def test_a_whole_minibatch_knows_the_same_ratios() -> None:
    """Behaviour and proximal are not exchanged, and a part that is not known stays so."""
    for behavior in ("snapshot", "merged", "bypass"):
        part = stale(config(behavior))
        whole = gather_minibatch(part, part.scores, OneRank())
        own, gathered = part.ratios(0, part.scores[0].logprobs), whole.evidence.ratios
        assert own.known == gathered.known
        for name in own.known:
            torch.testing.assert_close(own.get(name)[own.mask], gathered.get(name)[gathered.mask])
        if behavior == "snapshot":
            assert gathered.engine.abs().max() == 0 < gathered.lag.min()


def test_an_interpolated_anchor_is_weighed_as_a_3po_defines_it() -> None:
    """The anchor is half way in log-probs at age 1, so weight and ratio have the root of 1.6 each."""
    settings = config("interpolate", correction={"preset": "decoupled_token_is"}, loss={"name": "unclipped"})
    assert coefficient(settings) == pytest.approx(1.6, rel=1e-6)


@pytest.mark.parametrize("preset", [name for name in corrections.presets if name.startswith("decoupled")])
def test_bypass_refuses_decoupled_presets_with_the_reason(preset: str) -> None:
    """The rollout is the anchor: proximal / rollout is 1 on every token, and the preset would correct nothing."""
    with pytest.raises(ConfigError, match="bypass") as refused:
        recipe(config("bypass", correction={"preset": preset}))
    assert "bypass_" in str(refused.value)
    recipe(config("bypass", correction={"preset": "bypass_pg_is"}))


def test_only_what_is_known_is_measured() -> None:
    expected = {
        "snapshot": {"engine", "lag", "update", "staleness", "total"},
        "merged": {"merged", "update", "total"},
        "interpolate": {"total"},
        "bypass": {"total"},
        None: {"engine", "lag", "update", "staleness", "total"},
    }
    for behavior, names in expected.items():
        part = stale(config(behavior))
        ratios = part.ratios(0, torch.where(part.batches[0].mask, math.log(PROXIMAL), 0.0))
        assert set(ratios.known) == names
        found = diagnostics.finalize(diagnostics.metrics(Evidence(ratios, part.batches[0].advantages)))
        assert {name.partition("/")[0] for name in found} == names, behavior
        assert found["total/k3_kl"] == pytest.approx(0.6 - math.log(1.6), rel=1e-6)
        if behavior == "snapshot":
            assert found["lag/k3_kl"] == pytest.approx(0.6 - math.log(1.6), rel=1e-6)
            assert found["engine/k3_kl"] == found["update/k3_kl"] == 0


def test_an_anchor_that_was_not_measured_splits_nothing() -> None:
    values, mask = torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool)
    ratios = LogRatios(values, None, values + 1, mask, values, measured=False)
    assert ratios.known == ("total",)
    with pytest.raises(ConfigError, match="engine ratio is unknown"):
        ratios.get("engine")


@pytest.mark.parametrize("behavior", ["snapshot", "merged", "interpolate", "bypass", None])
def test_a_recording_of_stale_samples_is_judged_as_the_run_was(behavior: str | None, tmp_path: Path) -> None:
    """Every ratio that the run knew, weights and loss, from what was recorded alone."""
    rules = [] if behavior == "bypass" else [{"name": "token_tis", "thresholds": {"ratio": "merged"}}]
    settings = config(behavior, correction={"rules": rules}, record={"bundle": str(tmp_path)})
    part, objective, recorder = stale(settings), Objective(settings), ScoreRecorder(settings, 0, 1)
    current = torch.where(part.batches[0].mask, math.log(0.9), 0.0).requires_grad_()
    recorder.watch(part, objective.bind(part, OneRank(), first=True))(0, Scores(current))
    recorder.write(1)
    trained = objective.take(OneRank())
    assert f"{part.ratios(0, current).known[0]}/k3_kl" in trained
    found = judge(
        Candidate("as trained", settings.correction, settings.loss), settings, {1: ScoresReader(tmp_path).read(1)}
    )
    assert found.steps is not None
    assert found.steps[1] == pytest.approx(trained, nan_ok=True)


def test_an_averaged_anchor_is_not_recorded(tmp_path: Path) -> None:
    settings = config("merged", record={"bundle": str(tmp_path)})
    averaged = settings.model_copy(update={"pipeline": settings.pipeline.model_copy(update={"proximal": "average"})})
    part, objective = stale(averaged), Objective(averaged)
    bound = objective.bind(part, OneRank(), first=False)
    assert ScoreRecorder(averaged, 0, 1).watch(part, bound) is bound
    assert ScoreRecorder(settings, 0, 1).watch(part, bound) is not bound
