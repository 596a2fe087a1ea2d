"""One rule on several ratios: each with its own threshold, its own metrics and its own calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_trm import corrections
from moe_trm.batch.plan import plan_step
from moe_trm.config import resolve
from moe_trm.corrections import finalize
from moe_trm.errors import ConfigError
from moe_trm.step.objective import Objective
from moe_trm.step.recipe import recipe
from tests.unit.conftest import WorkedExample
from tests.unit.step.shared_minibatch import FakeLearner, Ranks, config, one_update, outcome, rows

TWICE: dict[str, Any] = {
    "correction": {
        "rules": [
            {"name": "token_tis", "thresholds": {"cap": 1.1}},
            {"name": "token_tis", "thresholds": {"cap": 3.0, "ratio": "lag"}},
            {"name": "trm_max", "thresholds": {"max_kl": 0.02, "ratio": "engine"}},
            {"name": "trm_max", "thresholds": {"max_kl": 0.2, "ratio": "staleness"}},
        ]
    }
}


def test_each_ratio_has_its_threshold_and_its_metrics(fx: WorkedExample) -> None:
    tis = corrections.get("token_tis")
    both = [tis.bind(cap=1.2), tis.bind(cap=1.5, ratio="staleness")]
    joint, alone = corrections.compose(both)(fx.evidence), [rule(fx.evidence) for rule in both]
    assert joint.weights.equal(alone[0].weights * alone[1].weights)
    trm = corrections.get("trm_max")
    found = finalize(
        corrections.compose([trm.bind(max_kl=0.5, ratio=r) for r in ("engine", "staleness")])(fx.evidence).metrics
    )
    assert found["correction/trm_max@engine/score"] != found["correction/trm_max@staleness/score"]
    assert not any(name.startswith("correction/trm_max/") for name in found)


def test_a_rule_that_stands_alone_keeps_its_plain_name(fx: WorkedExample) -> None:
    found = corrections.compose([corrections.get("token_tis").bind(ratio="lag")])(fx.evidence).metrics
    assert any(name.startswith("correction/token_tis/kept_fraction") for name in found)


def test_a_run_takes_them_and_reports_each() -> None:
    metrics = outcome(config(**TWICE), ranks=2, micro_batch_rows=2)["metrics"]
    for name in ("token_tis@engine", "token_tis@lag", "trm_max@engine", "trm_max@staleness"):
        assert f"correction/{name}/kept_fraction" in metrics
    kept = [metrics[f"correction/trm_max@{ratio}/kept_sequence_fraction"] for ratio in ("engine", "staleness")]
    assert kept[0] != kept[1]


def test_the_same_rule_on_the_same_ratio_is_refused() -> None:
    twice = [{"name": "trm_max", "thresholds": {"max_kl": value}} for value in (0.1, 0.2)]
    with pytest.raises(ConfigError, match="more than once"):
        recipe(config(correction={"rules": twice}))
    with pytest.raises(ConfigError, match="more than once"):
        recipe(config(correction={"rules": [twice[0], {"name": "trm_max", "target_reject_rate": 0.1}]}))


def test_each_is_calibrated_by_itself() -> None:
    calibrated = [
        {"name": "trm_max", "target_reject_rate": 0.25, "thresholds": {"ratio": ratio}} for ratio in ("engine", "total")
    ]
    settings = config(correction={"calibration_steps": 1, "rules": calibrated})
    mini = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=5)[0][0]
    learner, objective = FakeLearner(Ranks(1), 0), Objective(settings)
    one_update(objective, learner, mini, first=False)
    after = one_update(objective, learner, mini, first=False)["metrics"]
    thresholds = [after[f"correction/trm_max@{ratio}/threshold_max_kl"] for ratio in ("engine", "total")]
    assert thresholds[0] != thresholds[1]
    for ratio in ("engine", "total"):
        assert 0.7 <= after[f"correction/trm_max@{ratio}/kept_sequence_fraction"] < 1
    assert objective.state(learner)["thresholds"]["chosen"].keys() == {"trm_max@engine", "trm_max@total"}
    resumed = Objective(settings)
    resumed.restore(objective.state(learner), learner)
    assert one_update(resumed, learner, mini, first=False)["metrics"] == after


def test_a_configuration_may_list_them(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {checkpoint: none}\n", encoding="utf-8")
    rules = "[{name: trm_max, thresholds: {max_kl: 0.1}}, {name: trm_max, thresholds: {max_kl: 0.1, ratio: engine}}]"
    recipe(resolve(file, [f"correction.rules={rules}"]).config)
