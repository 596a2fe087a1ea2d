"""The class that is mixed in before TRL's trainer, on tensors and calls of the shapes in TRL's source."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm.adapters.trl import Corrected
from moe_trm.corrections.plain import Rules
from moe_trm.errors import ConfigError

ICEPOP: Rules = [("icepop", {"low": 0.5, "high": 2.0, "ratio": "merged"})]


class Host:
    """The part of `GRPOTrainer` that the class reads: methods in the same order of calls, on given log-probs."""

    def __init__(self, logprobs: Tensor, **settings: Any) -> None:
        self.logprobs, self.model = logprobs, SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        self.use_vllm, self.vllm_importance_sampling_correction = False, True
        self.loss_type, self.beta, self.ref_model = "bnpo", 0.0, None
        self.args = SimpleNamespace(use_liger_kernel=False)
        self._metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.__dict__ |= settings

    def _get_per_token_logps_and_entropies(
        self, _model: Any, _ids: Tensor, _mask: Tensor, _keep: int, batch_size: int | None = None
    ) -> tuple[Tensor, None, None]:
        assert batch_size
        return self.logprobs, None, None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        current, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, ids.shape[1])
        advantages = inputs["advantages"]
        advantages = advantages[:, None] if advantages.dim() == 1 else advantages
        old = inputs.get("old_per_token_logps", current.detach())
        return -((current - old).exp() * advantages * mask).sum() / mask.sum()


class Trainer(Corrected, Host):  # type: ignore[misc]
    """As `class Trainer(Corrected, GRPOTrainer)`."""


def batch(**changes: Any) -> dict[str, Any]:
    """Ratios of trainer to engine: 1, e^1.5, e^-0.4 and padding; 1, 1 and padding."""
    old = torch.full((2, 4), -1.0)
    sampled = old - torch.tensor([[0.0, 1.5, -0.4, 7.0], [0.0, 0.0, 7.0, 7.0]])
    return {
        "completion_ids": torch.ones(2, 4, dtype=torch.long),
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
        "advantages": torch.tensor([1.0, -0.5]),
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampled,
    } | changes


def current() -> Tensor:
    return torch.full((2, 4), -1.0).requires_grad_()


WEIGHTS = torch.tensor([[1.0, 0.0, 0.67032, 0.0], [1.0, 1.0, 0.0, 0.0]])


@pytest.mark.parametrize("old", ["given", "left out"])
def test_weights_multiply_the_loss_of_each_token(old: str) -> None:
    """TRL leaves the old log-probs out where the weights have not moved."""
    trainer, inputs = Trainer(current(), rules=ICEPOP), batch()
    if old == "left out":
        del inputs["old_per_token_logps"]
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, trainer.logprobs)
    torch.testing.assert_close(gradient, -WEIGHTS * torch.tensor([[1.0], [-0.5]]) / 5)
    assert trainer._metrics["train"]["correction/kept_fraction"] == [pytest.approx(0.8)]
    assert trainer._metrics["train"]["merged/abs_log_ratio"] == [pytest.approx(1.9 / 5)]
    assert inputs["advantages"].ndim == 1  # the caller's batch is as it was


def test_advantages_of_tokens_and_tool_masks() -> None:
    inputs = batch(
        advantages=torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]),
        tool_mask=torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]),
    )
    trainer = Trainer(current(), rules=ICEPOP)
    trainer._compute_loss(trainer.model, inputs)
    assert trainer._metrics["train"]["correction/kept_fraction"] == [1.0]


def test_a_row_without_log_probs_is_dropped_and_counted() -> None:
    inputs = batch()
    inputs["sampling_per_token_logps"][0, 0] = float("nan")
    trainer = Trainer(current(), rules=ICEPOP)
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, trainer.logprobs)
    torch.testing.assert_close(gradient[1], 0.5 * WEIGHTS[1] / 5)
    assert not gradient[0].any()
    assert trainer._metrics["train"]["records/no_logprobs_fraction"] == [0.5]


def test_only_the_loss_is_corrected() -> None:
    """Scores of the old policy and of a reference pass through."""
    trainer = Trainer(current(), rules=ICEPOP)
    ids = torch.ones(2, 4)
    found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 4, batch_size=1)
    assert found[0] is trainer.logprobs
    assert not trainer._metrics["train"]


def test_an_engine_without_log_probs_is_refused() -> None:
    inputs = batch()
    del inputs["sampling_per_token_logps"]
    with pytest.raises(ConfigError, match="rollout_func"):
        Trainer(current(), rules=ICEPOP)._compute_loss(None, inputs)


def test_rules_on_the_engine_need_fresh_samples() -> None:
    engine: Rules = [("icepop", {"low": 0.5, "high": 2.0})]
    with pytest.raises(ConfigError, match=r"let the rule read `merged`.*in an adapter, `fresh=True`"):
        Trainer(current(), rules=engine)._compute_loss(SimpleNamespace(), batch())
    trainer = Trainer(current(), rules=engine, fresh=True)
    trainer._compute_loss(trainer.model, batch())
    assert trainer._metrics["train"]["correction/kept_fraction"] == [pytest.approx(0.8)]


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"use_vllm": True}, "vllm_importance_sampling_correction"),
        ({"loss_type": "vespo"}, "loss_type"),
        ({"args": SimpleNamespace(use_liger_kernel=True)}, "use_liger_kernel"),
        ({"beta": 0.1, "routes": {}}, "beta"),
        ({"rules": [("m2po", {"budget": 0.04})]}, "whole minibatch"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_at_once(options: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        Trainer(current(), **{"rules": ICEPOP} | options)


def test_rules_that_only_reject_go_with_trls_own_weights() -> None:
    Trainer(current(), rules=[("trm_max", {"max_kl": 0.5})], use_vllm=True)
