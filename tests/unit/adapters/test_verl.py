"""verl's hooks on tensors as its callers hand them over: `[B, R]`, padded on the right of the answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm import losses
from moe_trm.adapters.verl import policy_loss, rollout_correction
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.plain import Rules, correct
from moe_trm.corrections.rule import rule
from moe_trm.errors import ConfigError

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 1]])
TRM: Rules = [("trm_max", {"max_kl": 0.05, "ratio": "update"})]


def batch(**changes: Any) -> SimpleNamespace:
    """A batch as `DataProto` has it: a mapping in `batch`. One token is far off, a row is a little off."""
    gen = torch.Generator().manual_seed(0)
    rollout = -torch.rand(3, 4, generator=gen)
    old = rollout.clone()
    old[0, 1] += 1.5
    old[2] -= 0.4
    old[1, 2] = float("nan")  # padding
    tensors = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": MASK.clone()} | changes
    return SimpleNamespace(batch={name: value for name, value in tensors.items() if value is not None})


@pytest.mark.parametrize("rules", ["decoupled_token_icepop", "decoupled_k3_rs_seq_tis", "decoupled_geo_rs_token_tis"])
@pytest.mark.parametrize("normalize", ["off", "token"])
def test_weights_are_added_and_masks_stay(rules: str, normalize: Any) -> None:
    given = batch()
    got, metrics = rollout_correction(rules, batch_normalize=normalize)(given, {"rollout_is": None})
    expected = correct(
        rules,
        rollout_logprobs=given.batch["rollout_log_probs"],
        proximal_logprobs=given.batch["old_log_probs"],
        mask=MASK.bool(),
        whole_minibatch=True,
        batch_normalize=normalize,
    )
    assert got is given
    assert torch.equal(got.batch["rollout_is_weights"], torch.where(expected.keep, expected.weights, 0.0))
    assert torch.equal(got.batch["response_mask"], MASK)
    assert metrics["rollout_corr/correction/kept_fraction"] == expected.metrics["correction/kept_fraction"]


def test_kept_and_dropped_tokens_worked_out() -> None:
    """A ratio of e^1.5 is outside of the band, e^-0.4 inside."""
    rules: Rules = [("icepop", {"low": 0.5, "high": 2.0, "ratio": "merged"})]
    got, _ = rollout_correction(rules)(batch())
    lower = 0.67032
    expected = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [lower, lower, 0, lower]])
    torch.testing.assert_close(got.batch["rollout_is_weights"], expected)


@rule(ratio="engine", scope="token")
def first_token_dropped(evidence: Evidence, log_ratio: Tensor) -> Correction:
    """A rule of one's own, which leaves the weight of what it drops as it is."""
    keep = evidence.mask.clone()
    keep[:, 0] = False
    return Correction(torch.ones_like(log_ratio), keep, {})


def test_a_rules_own_weight_of_a_dropped_token_does_not_count() -> None:
    got, _ = rollout_correction([first_token_dropped.bind()], fresh=True)(batch())
    assert torch.equal(got.batch["rollout_is_weights"], (MASK * torch.tensor([0, 1, 1, 1])).float())


def test_what_the_batch_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="rollout_log_probs"):
        rollout_correction("decoupled_token_is")(batch(rollout_log_probs=None))
    with pytest.raises(ConfigError, match="advantages"):
        rollout_correction([("opsm", {"delta": 0.01, "ratio": "merged"})])(batch())
    with pytest.raises(ConfigError, match="ratio=total"):
        rollout_correction("bypass_pg_is")(batch())
    engine: Rules = [("icepop", {"low": 0.5, "high": 2.0})]
    with pytest.raises(ConfigError, match="merged"):
        rollout_correction(engine)(batch())
    assert rollout_correction(engine, fresh=True)(batch())[0].batch["rollout_is_weights"].any()


def test_settings_of_verls_own_correction_are_refused() -> None:
    with pytest.raises(ConfigError, match="rollout_rs"):
        rollout_correction("decoupled_token_is")(batch(), {"rollout_rs": "token_k1"})


def token_mean(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, **info: Any) -> Tensor:
    """As verl's: a masked sum over a number of tokens, of the whole batch where that is known."""
    assert loss_agg_mode == "token-mean"
    return (loss_mat * loss_mask).sum() / info.get("batch_num_tokens", loss_mask.sum())


def updated(shift: float = 0.1) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(1)
    old = -torch.rand(3, 4, generator=gen)
    moved = old + shift * torch.randn(3, 4, generator=gen)
    moved[0, 1] = old[0, 1] + 1.0
    advantages = torch.tensor([1.0, -1.0, -0.5])[:, None].expand(3, 4)
    return {
        "old_log_prob": old,
        "log_prob": moved.requires_grad_(),
        "advantages": advantages,
        "response_mask": MASK.bool(),
        "loss_agg_mode": "token-mean",
    }


def test_the_loss_of_dropped_rows_is_gone_and_their_tokens_still_count() -> None:
    given = updated()
    loss, metrics = policy_loss(TRM, aggregate=token_mean)(**given, config=SimpleNamespace(global_batch_info={}))
    ratio = (given["log_prob"] - given["old_log_prob"]).exp()
    advantages = given["advantages"]
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) * MASK
    torch.testing.assert_close(loss, clipped[1:].sum() / MASK.sum())  # the first row is dropped
    (gradient,) = torch.autograd.grad(loss, given["log_prob"])
    assert not gradient[0].any()
    assert gradient[1, 0] != 0
    assert metrics["actor/correction/kept_sequence_fraction"] == pytest.approx(2 / 3)
    assert "actor/loss/pg_clipfrac" in metrics


def test_weights_of_the_batch_and_global_sizes_are_used() -> None:
    given, weights = updated(), torch.tensor([[0.5], [2.0], [0.0]]).expand(3, 4)
    config = SimpleNamespace(global_batch_info={"batch_num_tokens": 100})
    function = policy_loss(aggregate=token_mean)
    loss, _ = function(**given, config=config, rollout_is_weights=weights)
    ratio = (given["log_prob"] - given["old_log_prob"]).exp()
    clipped = torch.maximum(-given["advantages"] * ratio, -given["advantages"] * ratio.clamp(0.8, 1.2))
    torch.testing.assert_close(loss, (clipped * weights * MASK).sum() / 100)


def test_in_bypass_the_anchor_is_the_rollout() -> None:
    rules: Rules = [("token_tis", {"cap": 1.5, "ratio": "total"})]
    function = policy_loss(rules, loss="reinforce", bypass=True, aggregate=token_mean)
    given = updated()
    loss, _ = function(**given)
    weights = (given["log_prob"] - given["old_log_prob"]).exp().clamp(max=1.5).detach()
    (gradient,) = torch.autograd.grad(loss, given["log_prob"])
    torch.testing.assert_close(gradient, -weights * given["advantages"] * MASK / MASK.sum())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rule on the rollout": ({"rules": [("icepop", {"low": 0.5, "high": 2.0})]}, "ratio=update"),
    "a rule on the update in bypass": ({"rules": TRM, "bypass": True}, "ratio=total"),
    "a rule on the batch": ({"rules": [("m2po", {"budget": 0.04, "ratio": "update"})]}, "whole minibatch"),
    "a loss on the total": ({"loss": "ppo_clip", "parameters": {"ratio": "total"}}, "ppo_clip"),
    "the ratio twice": ({"rules": [("token_tis", {"cap": 2.0, "ratio": "update"})]}, "counted twice"),
    "an unknown loss": ({"loss": "ppo_clap"}, "ppo_clip"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_verl_does_not_tell_is_refused_at_once(name: str) -> None:
    options: dict[str, Any]
    options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        policy_loss(**dict[str, Any](rules="disabled", aggregate=token_mean) | options)


@pytest.mark.parametrize("name", [name for name in losses.names() if losses.get(name).needs])
def test_losses_with_other_needs_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        policy_loss(loss=name, bypass=True, aggregate=token_mean)
