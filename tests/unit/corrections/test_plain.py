"""Corrections on plain tensors: what a run by configuration computes, and typed errors for what is not given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm import corrections
from moe_trm.corrections import Evidence
from moe_trm.corrections.plain import bind, correct
from moe_trm.errors import ConfigError
from moe_trm.ratios import LogRatios
from tests.unit.conftest import WorkedExample


def given(example: WorkedExample, **changes: Any) -> dict[str, Any]:
    """Stale samples: the proximal log-probs are other ones than those of the weights that sampled."""
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0]).double()[:, None].expand_as(example.rollout)
    return {
        "rollout_logprobs": example.rollout,
        "behavior_logprobs": example.behavior,
        "proximal_logprobs": example.behavior + 0.1,
        "current_logprobs": example.current,
        "mask": example.mask,
        "advantages": advantages,
    } | changes


RULES = {
    "trm with opsm": [("trm_max", {"max_kl": 0.5}), ("opsm", {"delta": 0.01})],
    "icepop": [("icepop", {"low": 0.5, "high": 2.0})],
    "one rule on two ratios": [
        ("token_tis", {"cap": 2.0, "ratio": "engine"}),
        ("token_k1", {"low": 0.5, "high": 2.0, "ratio": "total"}),
    ],
}


@pytest.mark.parametrize("name", [*corrections.presets, *RULES])
def test_equal_to_the_rules_themselves(name: str) -> None:
    example = WorkedExample()
    data = given(example)
    specs: Any = RULES.get(name, name)
    pairs: Any = RULES[name] if name in RULES else corrections.presets[name].rules
    got = correct(specs, **data)
    ratios = LogRatios(
        data["rollout_logprobs"],
        data["behavior_logprobs"],
        data["current_logprobs"],
        data["mask"],
        data["proximal_logprobs"],
    )
    bound = [corrections.get(rule).bind(**thresholds) for rule, thresholds in pairs]
    expected = corrections.compose(bound)(Evidence(ratios, data["advantages"]))
    torch.testing.assert_close(got.weights, expected.weights, rtol=0, atol=0)
    assert torch.equal(got.keep, expected.keep)
    assert got.metrics == corrections.finalize(expected.metrics)
    assert got.metrics["correction/kept_fraction"] == float(got.keep.sum()) / float(data["mask"].sum())


def test_kept_and_dropped_tokens_worked_out() -> None:
    """Engine ratios 1, e, 1/e in the first row; the second row has one token, and rubbish where nothing was sampled."""
    rollout = torch.tensor([[-2.0, -2.0, -2.0], [-1.0, float("nan"), 7.0]])
    behavior = torch.tensor([[-2.0, -1.0, -3.0], [-1.5, 3.0, float("inf")]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    got = correct(
        [("icepop", {"low": 0.5, "high": 2.0})],
        rollout_logprobs=rollout,
        behavior_logprobs=behavior,
        current_logprobs=behavior.clone().requires_grad_(),
        mask=mask,
        advantages=torch.ones(2, 3),
    )
    assert got.keep.tolist() == [[True, False, False], [True, False, False]]
    torch.testing.assert_close(got.weights, torch.tensor([[1.0, 0.0, 0.0], [2.718281828**-0.5, 0.0, 0.0]]))
    assert not got.weights.requires_grad
    assert got.metrics["correction/icepop/kept_fraction"] == 0.5


def test_weights_are_normalised_over_the_whole_minibatch_only() -> None:
    data = given(WorkedExample())
    with pytest.raises(ConfigError, match="whole minibatch"):
        correct("decoupled_token_is", **data, batch_normalize="token")
    got = correct("decoupled_token_is", **data, batch_normalize="token", whole_minibatch=True)
    assert float(got.weights[data["mask"]].mean()) == pytest.approx(1.0)
    assert got.metrics["correction/weight_mean"] == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="whole minibatch"):
        correct([("m2po", {"budget": 0.04})], **data)


def test_weights_that_sampled_may_be_gone() -> None:
    data = given(WorkedExample(), behavior_logprobs=None)
    with pytest.raises(ConfigError, match="merged"):
        correct([("icepop", {"low": 0.5, "high": 2.0})], **data)
    got = correct([("icepop", {"low": 0.5, "high": 2.0, "ratio": "merged"})], **data)
    assert got.keep.any()


def test_the_policy_in_training_may_be_unknown() -> None:
    """A rule on it is refused; the others decide as they do with it."""
    data = given(WorkedExample())
    known = correct("decoupled_geo_rs_token_tis", **data)
    got = correct("decoupled_geo_rs_token_tis", **data | {"current_logprobs": None})
    assert torch.equal(got.weights, known.weights)
    for rules in ("bypass_pg_is", [("trm_max", {"max_kl": 0.5})]):
        with pytest.raises(ConfigError, match="merged"):
            correct(rules, **data | {"current_logprobs": None})


def test_advantages_may_be_unknown() -> None:
    """They are never taken for zero, which no rule on their sign would reject."""
    data = given(WorkedExample())
    known = correct([("trm_max", {"max_kl": 0.5})], **data)
    got = correct([("trm_max", {"max_kl": 0.5})], **data | {"advantages": None})
    assert torch.equal(got.keep, known.keep)
    with pytest.raises(ConfigError, match="advantages"):
        correct([("opsm", {"delta": 0.01})], **data | {"advantages": None})


@pytest.mark.parametrize("rules", ["icepop", "no_such_preset", [("no_such_rule", {})], [("icepop", {"lo": 1.0})]])
def test_unknown_names_are_refused(rules: Any) -> None:
    with pytest.raises(ConfigError):
        bind(rules)


@pytest.mark.parametrize(
    ("name", "value"),
    [("advantages", torch.ones(4)), ("exact_kl", torch.ones(4, 4)), ("mask", torch.ones(4, 5, 1))],
)
def test_other_shapes_are_refused(name: str, value: Tensor) -> None:
    with pytest.raises(ConfigError):
        correct("disabled", **given(WorkedExample(), **{name: value}))


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    source = (
        "from moe_trm.corrections import Correction\nfrom moe_trm.corrections.rule import rule\n"
        "@rule(ratio='merged', scope='token')\ndef f(e, x):\n"
        "    return Correction(e.mask.float() * float('nan'), e.mask, {})\n"
    )
    (tmp_path / "mine.py").write_text(source)
    logprobs, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ConfigError, match="no finite numbers"):
        correct([(f"{tmp_path / 'mine.py'}:f", {})], rollout_logprobs=logprobs, proximal_logprobs=logprobs, mask=mask)
