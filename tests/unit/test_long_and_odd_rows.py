"""Rows of 100,000 tokens, of one, of none, all rejected, with NaN: rules, losses and metrics without warnings."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_trm import corrections, diagnostics, losses
from moe_trm.corrections import Evidence
from moe_trm.losses import LossInputs, aggregate
from moe_trm.methods.parameters import declared
from moe_trm.ratios import LogRatios
from tests.unit.corrections.test_correction_properties import bound


def evidence(lengths: list[int], noise: float = 0.1) -> tuple[Evidence, Tensor]:
    gen, width = torch.Generator().manual_seed(1), max(1, *lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    rollout = -torch.rand(len(lengths), width, generator=gen)
    moved = [noise * torch.randn(rollout.shape, generator=gen) for _ in range(2)]
    current = (rollout + moved[0] + moved[1]).requires_grad_()
    advantages = torch.where(torch.arange(len(lengths)) % 2 == 0, 1.0, -1.0)[:, None] * mask
    ratios = LogRatios(rollout, rollout + moved[0], current, mask)
    rewards = torch.arange(len(lengths)).float() % 2
    return Evidence(ratios, advantages, turn_ids=torch.zeros_like(mask, dtype=torch.int32), rewards=rewards), current


LENGTHS = {"long": [100_000, 7], "one token": [1, 1, 1], "with an empty row": [3, 0, 5], "nothing": [0, 0]}


@pytest.mark.parametrize("rule", corrections.names())
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_rules(rule: str, lengths: list[int]) -> None:
    seen, _ = evidence(lengths)
    correction = bound(rule)(seen)
    assert correction.weights.isfinite().all()
    assert not correction.keep[~seen.mask].any()
    assert all(torch.tensor(list(corrections.finalize(correction.metrics).values())).isfinite())


@pytest.mark.parametrize("name", losses.names())
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_losses(name: str, lengths: list[int]) -> None:
    seen, current = evidence(lengths, noise=0.01)
    required, _ = declared(losses.get(name).function)
    inputs = replace(
        LossInputs.uncorrected(seen.ratios, current, seen.advantages),
        turn_ids=seen.turn_ids,
        rewards=seen.rewards,
        group_ids=torch.zeros(len(lengths), dtype=torch.int64),
        entropy=torch.ones(seen.mask.shape),
        router_shift=torch.ones(seen.mask.shape),
        reference_logprobs=torch.full(seen.mask.shape, -1.0),
    )
    values = losses.get(name).bind(**dict.fromkeys(required, 0.1))(inputs).values
    loss = aggregate(values, inputs.keep, seen.mask, "token-mean", num_sequences=len(lengths), num_tokens=sum(lengths))
    assert loss.isfinite()
    if loss.requires_grad:
        loss.backward()
        assert current.grad is not None
        assert current.grad.isfinite().all()
        assert not current.grad[~seen.mask].any()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_diagnostics(lengths: list[int]) -> None:
    seen, _ = evidence(lengths)
    keep_none = bound("trm_max")(replace(seen, ratios=evidence(lengths, noise=5.0)[0].ratios))
    metrics = diagnostics.finalize({**diagnostics.metrics(seen), **diagnostics.acceptance(seen, keep_none)})
    assert all(torch.tensor(list(metrics.values())).isfinite())
    if not any(lengths):
        assert metrics == {}


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_against_a_loop_over_rows(seed: int) -> None:
    """Rows of padding are in no class."""
    draw = random.Random(seed)
    lengths = [0, 0, *(draw.choice([1, 3, 16, 17, 64, 65]) for _ in range(8))]
    seen, _ = evidence(lengths)
    signs = torch.tensor([draw.choice([-1.0, 0.0, 1.0]) for _ in lengths]).double()
    rewards = torch.tensor([draw.choice([0.0, 1.0]) for _ in lengths])
    seen = replace(
        seen,
        advantages=signs[:, None].expand(seen.mask.shape),
        rewards=rewards,
        group_means=torch.full((len(lengths),), 0.5),
        turn_ids=None,
    )
    keep = seen.mask & (torch.rand(seen.mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.98)
    got = diagnostics.finalize(diagnostics.acceptance(seen, replace(bound("token_tis")(seen), keep=keep)))
    classes: dict[str, list[bool]] = {}
    for row, length in enumerate(lengths):
        if length:
            whole = int(keep[row].sum()) == length
            for name in (
                {1.0: "positive", 0.0: "zero", -1.0: "negative"}[float(signs[row])],
                "correct" if rewards[row] else "wrong",
                "length_1_16" if length <= 16 else "length_17_64" if length <= 64 else "length_65_256",
            ):
                classes.setdefault(f"acceptance/{name}", []).append(whole)
    assert got == {name: pytest.approx(sum(whole) / len(whole)) for name, whole in classes.items()}


def test_acceptance_by_turn() -> None:
    seen, _ = evidence([4, 4, 4, 4])
    turns = (torch.arange(4) >= 2).int().expand(4, 4) * torch.tensor([[1], [1], [0], [0]])
    seen = replace(seen, turn_ids=turns)
    whole = bound("token_tis")(seen)
    keep = whole.keep.clone()
    keep[1, 3] = False
    got = diagnostics.finalize(diagnostics.acceptance(seen, replace(whole, keep=keep)))
    assert got["acceptance/multi_turn"] == 0.5
    assert got["acceptance/later_turn_tokens"] == 0.75
    assert got["acceptance/first_turn_tokens"] == 1.0


def test_a_nan_ratio_is_told_not_hidden() -> None:
    seen, _ = evidence([3, 5])
    rollout = seen.ratios.rollout_logprobs.clone()
    rollout[0, 1] = torch.nan
    broken = LogRatios(rollout, rollout.nan_to_num(), rollout.nan_to_num(), seen.mask)
    metrics = diagnostics.finalize(diagnostics.metrics(replace(seen, ratios=broken)))
    assert math.isnan(metrics["engine/k3_kl"])
