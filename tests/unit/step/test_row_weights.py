"""A row's weight multiplies its part of the loss, whoever judges it, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.step import shared_minibatch
from tests.unit.step.shared_minibatch import assert_same, config, outcome
from tests.unit.step.shared_minibatch import rows as plain_rows

WEIGHT = 0.25
HEAVY = 4
"""Rows from here on have the weight."""
CASES: dict[str, dict[str, Any]] = {
    "by parts": {"correction": {"rules": [{"name": "opsm", "thresholds": {"delta": 0.01}}, {"name": "icepop"}]}},
    "whole rule": {
        "correction": {"rules": [{"name": "m2po", "thresholds": {"budget": 0.02}}]},
        "loss": {"name": "unclipped"},
    },
    "normalised": {"correction": {"preset": "decoupled_token_is", "batch_normalize": "token"}},
    "whole loss": {"loss": {"name": "kl_cov", "parameters": {"share": 0.2}}},
    "kl and entropy": {"kl": {"coef": 0.3, "estimator": "k3"}, "loss": {"entropy_coef": 0.1, "rollout_kl_coef": 0.2}},
    "geometric": {"loss": {"name": "gmpo"}, "correction": {"preset": "decoupled_token_is"}},
    "penalised": {"loss": {"name": "r2vpo"}},
    "measured only": {"correction": {"rules": [{"name": "icepop"}], "decide_after": 5}},
}


@pytest.mark.parametrize("name", CASES)
def test_a_weight_scales_the_gradient_of_its_row_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(**CASES[name])
    plain = outcome(settings, ranks=1, micro_batch_rows=100)

    def weighted() -> list[Any]:
        return [replace(row, weight=WEIGHT if i >= HEAVY else 1.0) for i, row in enumerate(plain_rows())]

    monkeypatch.setattr(shared_minibatch, "rows", weighted)
    once = outcome(settings, ranks=1, micro_batch_rows=100)
    assert_same(once, outcome(settings, ranks=2, micro_batch_rows=2))
    for kind in ("gradients", "entropy_gradients"):
        for sample, gradient in plain[kind].items():
            factor = WEIGHT if sample >= HEAVY else 1.0
            torch.testing.assert_close(once[kind][sample], factor * gradient, rtol=1e-5, atol=1e-8)
    assert once["metrics"]["correction/kept_fraction"] == plain["metrics"]["correction/kept_fraction"]
