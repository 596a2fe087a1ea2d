"""Losses that treat prompts or turns apart, against loops over floats: values, gradients, dropped and bad tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_trm import corrections, losses
from moe_trm.corrections import Evidence
from moe_trm.errors import ConfigError
from moe_trm.losses import LossInputs
from moe_trm.losses.quatro import optimal_multipliers
from moe_trm.losses.r2vpo import group_variance
from moe_trm.methods.summable import finalize
from moe_trm.ratios import LogRatios

ROWS, TOKENS = 6, 5
GROUPS = torch.tensor([3, 0, 3, 0, 3, 7])
ADVANTAGES = torch.tensor([1.0, -0.5, -1.0, 0.5, 0.25, 0.7], dtype=torch.float64)
TURNS = torch.tensor([[0, 0, 1, 1, 2]]).expand(ROWS, TOKENS)


def inputs_of(seed: int, *, far: tuple[int, int] | None = None, stale: bool = False) -> tuple[LossInputs, Tensor]:
    """Rows of three prompts with holes; IcePop drops token `far`. `stale`: the weights that sampled are gone."""
    gen = torch.Generator().manual_seed(seed)
    update, lag = torch.randn(2, ROWS, TOKENS, generator=gen, dtype=torch.float64) * 0.3
    mask = torch.rand(ROWS, TOKENS, generator=gen) < 0.8
    mask[:, 0] = True
    current = torch.full_like(update, -1.0).requires_grad_()
    proximal = current.detach() - update
    rollout = proximal - (lag if stale else 0.0)
    if far is not None:
        rollout = rollout.clone()
        rollout[far] += 9.0
    ratios = LogRatios(rollout, None if stale else proximal, current, mask, proximal)
    advantages = ADVANTAGES[:, None].expand(ROWS, TOKENS)
    band = corrections.get("icepop").bind(weight="one", low=1e-3, high=1e3, ratio="merged" if stale else "engine")
    correction = band(Evidence(ratios, advantages))
    assert int((mask & ~correction.keep).sum()) == (far is not None)
    inputs = LossInputs.corrected(ratios, current, advantages, correction)
    return replace(inputs, group_ids=GROUPS, turn_ids=TURNS), current


def found(name: str, inputs: LossInputs, current: Tensor, **parameters: Any) -> tuple[Tensor, Tensor]:
    """Values on kept tokens, 0 elsewhere, and their derivatives by each log-prob."""
    values = torch.where(inputs.keep, losses.get(name)(inputs, **parameters).values, 0.0)
    (slope,) = torch.autograd.grad(values.sum(), current)
    return values.detach(), slope


def multiplier_by_hand(advantages: list[float], budget: float) -> float:
    """Bisection over floats on KL(softmax(A / m) || uniform) = budget."""

    def kl(m: float) -> float:
        weights = [math.exp((a - max(advantages)) / m) for a in advantages]
        shares = [w / sum(weights) for w in weights]
        return sum(p * math.log(len(shares) * p) for p in shares if p > 0)

    spread = max(advantages) - min(advantages)
    if spread == 0 or kl(1e-6 * spread) <= budget:
        return 0.0
    low, high = 1e-6 * spread, 1e6 * spread
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if kl(middle) > budget else (low, middle)
    return low


def test_golden_multiplier() -> None:
    rewards, groups = torch.tensor([1.0, 0, 1, 0, 0.3, 0.3]), torch.tensor([5, 5, 5, 5, 1, 1])
    got, apart = optimal_multipliers(rewards, groups, torch.ones(6).bool(), budget=0.01)
    assert got.tolist() == pytest.approx([3.51779] * 4 + [0, 0], abs=1e-5)
    assert apart.tolist() == [True] * 4 + [False] * 2


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-20, 20), st.booleans()), min_size=1, max_size=10),
    st.sampled_from([1e-3, 0.05, 0.4, 2.0]),
)
def test_multipliers_are_the_loop(rows: list[tuple[int, int, bool]], budget: float) -> None:
    groups, tenths, judged = (list(column) for column in zip(*rows, strict=True))
    values = [tenth / 10 for tenth in tenths]
    got, _ = optimal_multipliers(
        torch.tensor(values, dtype=torch.float64), torch.tensor(groups), torch.tensor(judged), budget=budget
    )
    for group, value in zip(groups, got.tolist(), strict=True):
        own = [v for g, v, here in zip(groups, values, judged, strict=True) if g == group and here]
        assert value == pytest.approx(multiplier_by_hand(own, budget) if own else 0.0, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("far", [None, (2, 0)])
def test_quatro_query_by_a_loop(far: tuple[int, int] | None, stale: bool) -> None:
    """A dropped token changes no multiplier; the prompt of one row trains nothing."""
    inputs, current = inputs_of(1, far=far, stale=stale)
    values, slope = found("quatro_query", inputs, current, budget=0.05)
    update = inputs.ratios.update.detach()
    for i in range(ROWS):
        own = [float(a) for a, g in zip(ADVANTAGES, GROUPS, strict=True) if g == GROUPS[i]]
        multiplier = multiplier_by_hand(own, 0.05)
        for t in range(TOKENS):
            x = float(update[i, t])
            trains = bool(inputs.keep[i, t]) and len(set(own)) > 1
            coefficient = math.exp(x) * (float(ADVANTAGES[i]) - multiplier * x) if trains else 0.0
            assert float(slope[i, t]) == pytest.approx(-coefficient, abs=1e-9)
            assert float(values[i, t]) == pytest.approx(coefficient, abs=1e-9)  # the log-prob is -1


def test_quatro_query_says_its_multiplier() -> None:
    inputs, _ = inputs_of(2)
    counts = {int(g): int(inputs.keep[g == GROUPS].sum()) for g in (0, 3)}
    expected = sum(n * multiplier_by_hand(ADVANTAGES[g == GROUPS].tolist(), 0.01) for g, n in counts.items())
    got = finalize(losses.get("quatro_query")(inputs).metrics)["loss/multiplier"]
    assert got == pytest.approx(expected / sum(counts.values()))


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("far", [None, (2, 0)])
def test_r2vpo_clip_by_a_loop(far: tuple[int, int] | None, stale: bool) -> None:
    """The variance is over all sampled tokens, also the one that a rule drops."""
    inputs, current = inputs_of(3, far=far, stale=stale)
    values, slope = found("r2vpo_clip", inputs, current, clip_low=0.3, clip_high=0.5, variance=0.05)
    ratio, mask = inputs.ratios.update.detach().exp(), inputs.mask
    clipped = 0
    for i in range(ROWS):
        own = [float(ratio[j, t]) for j in range(ROWS) for t in range(TOKENS) if GROUPS[j] == GROUPS[i] and mask[j, t]]
        mean = sum(own) / len(own)
        share = 0.05 / (0.05 + sum((r - mean) ** 2 for r in own) / len(own))
        for t in range(TOKENS):
            r, a = float(ratio[i, t]), float(ADVANTAGES[i])
            bounded = min(max(r, 1 - 0.3 * share), 1 + 0.5 * share)
            free = -a * r >= -a * bounded
            kept = bool(inputs.keep[i, t])
            clipped += kept and not free
            assert float(values[i, t]) == pytest.approx(kept * max(-a * r, -a * bounded))
            assert float(slope[i, t]) == pytest.approx(-a * r if kept and free else 0.0)
    assert clipped


def test_equal_ratios_have_the_whole_range() -> None:
    ratio, counted = torch.full((2, 3), 1.7), torch.ones(2, 3).bool()
    assert group_variance(ratio, counted, torch.zeros(2).long()).tolist() == pytest.approx([0, 0], abs=1e-12)
    assert group_variance(ratio, ~counted, torch.zeros(2).long()).tolist() == [0, 0]
    assert not len(group_variance(ratio[:0], counted[:0], torch.zeros(0).long()))


@pytest.mark.parametrize("normalize", ["off", "row"])
@pytest.mark.parametrize("turn_ratio", ["geometric", "product"])
@pytest.mark.parametrize(("far", "low", "high"), [(None, 0.02, 0.04), ((2, 0), 0.02, 0.04), (None, 0.15, 0.25)])
def test_turns_by_a_loop(turn_ratio: str, normalize: str, far: tuple[int, int] | None, low: float, high: float) -> None:
    """With tokens of unlike advantages: each turn has its mean one. The wide clip has rows on both sides of bias 1."""
    inputs, current = inputs_of(4, far=far)
    advantages = ADVANTAGES[:, None] + 0.3 * torch.arange(TOKENS)
    inputs = replace(inputs, advantages=advantages)
    settings = {"clip_low": low, "clip_high": high, "turn_ratio": turn_ratio, "normalize": normalize}
    values, slope = found("turn_ppo", inputs, current, **settings)
    update, scaled, biases = inputs.ratios.update.detach(), 0, list[float]()
    for i in range(ROWS):
        turns: dict[int, list[int]] = {}
        for t in range(TOKENS):
            if inputs.mask[i, t]:
                turns.setdefault(int(TURNS[i, t]), []).append(t)
        sigma = {k: math.exp(sum(float(update[i, t]) for t in own)) for k, own in turns.items()}
        if turn_ratio == "geometric":
            sigma = {k: s ** (1 / len(turns[k])) for k, s in sigma.items()}
        mean = {k: sum(float(advantages[i, t]) for t in own) / len(own) for k, own in turns.items()}
        bounded = {k: min(max(s, 1 - low), 1 + high) for k, s in sigma.items()}
        excess = sum(len(own) * abs(sigma[k] - bounded[k]) * abs(mean[k]) for k, own in turns.items())
        weight = (low + high) / 2 * sum(len(own) * abs(mean[k]) for k, own in turns.items())
        scale = 1 / max(1.0, excess / weight) if normalize == "row" else 1.0
        biases.append(excess / weight)
        scaled += scale < 1
        for k, own in turns.items():
            free = -mean[k] * sigma[k] >= -mean[k] * bounded[k]
            kept = [t for t in own if inputs.keep[i, t]]
            share = 1 / len(own) if turn_ratio == "geometric" else 1.0
            for t in own:
                value = scale * max(-mean[k] * sigma[k], -mean[k] * bounded[k]) * (t in kept)
                assert float(values[i, t]) == pytest.approx(value)
                moved = -mean[k] * sigma[k] * scale * share * len(kept) if free and t in kept else 0.0
                assert float(slope[i, t]) == pytest.approx(moved, abs=1e-9)
    assert min(biases) < 1 or low < 0.1
    assert bool(scaled) == (normalize == "row" and max(biases) > 1)


def test_the_product_of_a_long_turn_is_bounded() -> None:
    current = torch.full((1, 300), 0.5, dtype=torch.float64).requires_grad_()
    zero = torch.zeros(1, 300, dtype=torch.float64)
    inputs = LossInputs.uncorrected(LogRatios(zero, zero, current, zero == 0), current, zero - 1)
    values = losses.get("turn_ppo")(inputs, turn_ratio="product").values
    assert values.detach()[0, 0] == pytest.approx(math.exp(20))


@pytest.mark.parametrize("name", ["quatro_query", "r2vpo_clip", "turn_ppo"])
def test_one_bad_sample_spoils_no_other(name: str) -> None:
    """A token of row 1 has no finite log-prob and was dropped: the rows of other prompts are as without it."""
    clean, current = inputs_of(5)
    expected, _ = found(name, clean, current)
    broken = current.detach().clone()
    broken[1, 0] = torch.nan
    broken.requires_grad_()
    ratios = LogRatios(clean.ratios.rollout_logprobs, None, broken, clean.mask, clean.ratios.rollout_logprobs)
    keep = clean.keep.clone()
    keep[1, 0] = False
    inputs = replace(clean, ratios=ratios, current_logprobs=broken, keep=keep)
    values, slope = found(name, inputs, broken)
    others = (GROUPS[1] != GROUPS) if name != "turn_ppo" else torch.arange(ROWS) != 1
    torch.testing.assert_close(values[others], expected[others])
    assert values.isfinite().all()
    assert slope.isfinite().all()


def test_what_cannot_work_is_refused() -> None:
    for name, parameters, said in (
        ("quatro_query", {"budget": 0.0}, "> 0"),
        ("r2vpo_clip", {"variance": 0.0}, "variance > 0"),
        ("r2vpo", {"target": 0.1}, "target and rate, or neither"),
        ("r2vpo", {"rate": 0.1}, "target and rate, or neither"),
        ("r2vpo", {"rate": -0.1, "target": 0.1}, "> 0"),
        ("turn_ppo", {"turn_ratio": "mean"}, "geometric, product"),
        ("turn_ppo", {"normalize": "on"}, "off, row"),
        ("turn_ppo", {"normalize": "row", "clip_low": 0.0, "clip_high": 0.0}, "a clip above 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            losses.get(name).bind(**parameters)
    alone = replace(inputs_of(0)[0], group_ids=None)
    for name in ("quatro_query", "r2vpo_clip"):
        with pytest.raises(ConfigError, match="samples of a prompt"):
            losses.get(name)(alone)
