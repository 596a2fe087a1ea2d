"""Every objective on random batches of any shape: only sampled tokens matter, gradients match finite differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_trm import losses
from moe_trm.losses import LossInputs, aggregate
from moe_trm.ratios import LogRatios

# All candidates, so that the random choice plays no part.
PARAMETERS = {"clip_cov": {"share": 1.0, "low": 0.0, "high": 100.0}, "kl_cov": {"share": 0.3}}
DIFFERENTIABLE = (
    "capped_ratio", "clip_cov", "dro", "gmpo", "gspo", "ipo_tv", "kl_cov", "oapl", "ppo_clip", "r2vpo", "sapo", "tbpo",
    "turn_ppo", "unclipped",
)  # fmt: skip
"""Losses whose gradient is that of their value. Others detach weights (see COEFFICIENTS) or bounds (`m2po_clip`)."""


@dataclass(frozen=True)
class Batch:
    """Log-probs, advantages and entropy `[B, T]`; group of each row `[B]`."""

    rollout: Tensor
    behavior: Tensor
    current: Tensor
    advantages: Tensor
    entropy: Tensor
    mask: Tensor
    groups: Tensor

    def inputs(self, current: Tensor) -> LossInputs:
        inputs = LossInputs.uncorrected(
            LogRatios(self.rollout, self.behavior, current, self.mask), current, self.advantages
        )
        rewards = torch.where(self.mask, self.advantages, -torch.inf).amax(dim=1)
        return replace(
            inputs,
            turn_ids=(self.mask.cumsum(dim=1) > 2).long(),
            rewards=torch.where(rewards > 0, 1.0, 0.0).double(),
            group_ids=self.groups,
            entropy=self.entropy,
            router_shift=self.entropy / 10,
            reference_logprobs=self.behavior,
        )

    def loss(self, name: str, current: Tensor) -> Tensor:
        objective, inputs = losses.get(name), self.inputs(current)
        values = objective(inputs, **PARAMETERS.get(name, {})).values
        return aggregate(
            values,
            inputs.keep,
            self.mask,
            objective.aggregation,
            num_sequences=len(self.mask),
            num_tokens=max(1, int(self.mask.sum())),
            horizon=32,
        )

    def gradient(self, name: str) -> Tensor:
        current = self.current.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(name, current), current)
        return gradient

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Batch:
        """The batch with `change` made to each `[B, T]` table; groups stay."""
        tables = {name: value for name, value in vars(self).items() if name != "groups"}
        return Batch(**{name: change(name, value) for name, value in tables.items()}, groups=self.groups)


def random_batch(seed: int, rows: int, tokens: int, spread: float = 0.3) -> Batch:
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    mask = torch.rand(rows, tokens, generator=gen) < 0.8
    mask[:, 0] = True
    behavior = -0.2 - normal(rows, tokens).abs()
    noise = [spread * normal(rows, tokens) for _ in range(2)]
    return Batch(
        behavior - noise[0] / 3,
        behavior,
        behavior + noise[1],
        normal(rows, 1).expand(rows, tokens),
        normal(rows, tokens).abs(),
        mask,
        torch.arange(rows) // 2,
    )


# With fewer rows covariances are equal, or nothing but rounding: which tokens the filters choose would be chance.
shapes = given(seed=st.integers(0, 10**6), rows=st.integers(3, 5), tokens=st.integers(1, 8))
few = settings(max_examples=8)
every_loss = pytest.mark.parametrize("name", losses.names())


@every_loss
@few
@shapes
def test_padding_and_tool_tokens_do_not_matter(name: str, seed: int, rows: int, tokens: int) -> None:
    batch = random_batch(seed, rows, tokens)

    def spread_out(key: str, value: Tensor) -> Tensor:
        """A column that nobody sampled after each one, full of what must not be read."""
        filling = torch.zeros_like(value) if key == "mask" else torch.full_like(value, torch.nan)
        return torch.stack([value, filling], dim=2).flatten(1)

    wide = batch.map(spread_out).gradient(name)
    torch.testing.assert_close(wide[:, ::2], batch.gradient(name))
    assert not wide[:, 1::2].any()


@every_loss
@few
@shapes
def test_row_order_does_not_matter(name: str, seed: int, rows: int, tokens: int) -> None:
    batch = random_batch(seed, rows, tokens)
    order = torch.tensor(np.random.default_rng(seed).permutation(rows))
    turned = replace(batch.map(lambda _, value: value[order]), groups=batch.groups[order])
    torch.testing.assert_close(turned.gradient(name), batch.gradient(name)[order])


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@few
@shapes
def test_gradient_is_that_of_finite_differences(name: str, seed: int, rows: int, tokens: int) -> None:
    batch, step = random_batch(seed, rows, tokens), 1e-6
    got = batch.gradient(name)
    for row, column in batch.mask.nonzero().tolist():
        nudge = torch.zeros_like(batch.current)
        nudge[row, column] = step
        above, below = (batch.loss(name, batch.current + sign * nudge).item() for sign in (1, -1))
        assert got[row, column].item() == pytest.approx((above - below) / (2 * step), abs=1e-7), (row, column)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def prefix_min(update: list[float], t: int) -> float:
    return float(np.exp(min(update[:t]))) if t else 1.0


def vespo_weight(log_weight: float, advantage: float) -> float:
    power, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    return float(np.exp(rate + power * log_weight - rate * np.exp(log_weight)))


# -d X / d log pi of token t of a row with advantage A, log-updates s, log totals f, worked out by hand: weights are
# constants.
COEFFICIENTS = {
    "cispo": lambda A, s, f, t: min(np.exp(s[t]), 1.28) * A,
    "reinforce": lambda A, s, f, t: A,
    "gpg": lambda A, s, f, t: A,
    "topr": lambda A, s, f, t: A if A > 0 else A * clip(np.exp(sum(f)), 0.7, 1.4),
    "minpro": lambda A, s, f, t: min(prefix_min(s, t) * np.exp(s[t]), 5.0) * A,
    "vespo": lambda A, s, f, t: vespo_weight(sum(f), A) * A,
    "minirl": lambda A, s, f, t: (
        0.0 if (A > 0 and np.exp(s[t]) > 1.2) or (A < 0 and np.exp(s[t]) < 0.8) else np.exp(f[t]) * A
    ),
}


BOUNDS = {"topr": {"low": 0.7, "high": 1.4}}


@pytest.mark.parametrize("name", COEFFICIENTS)
@few
@shapes
def test_coefficients_of_losses_with_detached_weights(name: str, seed: int, rows: int, tokens: int) -> None:
    batch = random_batch(seed, rows, tokens)
    current = batch.current.clone().requires_grad_()
    losses.get(name)(batch.inputs(current), **BOUNDS.get(name, {})).values[batch.mask].sum().backward()
    assert current.grad is not None
    for row in range(rows):
        own = batch.mask[row]
        s = (batch.current - batch.behavior)[row][own].tolist()
        f = (batch.current - batch.rollout)[row][own].tolist()
        expected = [COEFFICIENTS[name](batch.advantages[row, 0].item(), s, f, t) for t in range(len(s))]
        assert (-current.grad[row][own]).tolist() == pytest.approx(expected, abs=1e-9)
