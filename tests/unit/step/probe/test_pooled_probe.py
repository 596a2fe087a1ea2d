"""Pooled probe figures: exact values, intervals that respect prompts, and files as the run writes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_trm.errors import MoeTrmError
from moe_trm.step.probe.pooled import PooledTokens, load, pooled


def make(num_groups: int = 60, per_group: int = 40, seed: int = 0) -> PooledTokens:
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(num_groups), per_group)
    flipped = rng.random(len(group)) < 0.2
    numerics = rng.normal(0, 0.01, len(group))
    routing = np.where(flipped, rng.normal(0, 0.1, len(group)), 0.0)
    return PooledTokens(group, numerics + routing, numerics, np.where(flipped, 2, 0))


def k3(x: np.ndarray) -> float:
    return float((np.exp(x) - 1 - x).mean())


def test_values_are_pooled_means() -> None:
    tokens = make()
    flipped = tokens.flipped_layers > 0
    got = pooled(tokens, num_layers=4, resamples=300)
    expected = {
        "all/native_k3": k3(tokens.native),
        "all/replayed_k3": k3(tokens.replayed),
        "all/k3_reduction": k3(tokens.native) / k3(tokens.replayed),
        "flipped/native_k3": k3(tokens.native[flipped]),
        "flipped/replayed_k3": k3(tokens.replayed[flipped]),
        "flipped/k3_reduction": k3(tokens.native[flipped]) / k3(tokens.replayed[flipped]),
        "token_flip_rate": flipped.mean(),
        "layer_flip_rate": 2 * flipped.mean() / 4,
    }
    assert {name: figure.value for name, figure in got.items()} == pytest.approx(expected, rel=1e-6)
    for figure in got.values():
        assert figure.low < figure.value < figure.high
    assert got["flipped/k3_reduction"].low > 20


def test_intervals_are_over_prompts_not_tokens() -> None:
    """Duplicating every token of a prompt adds no information and must not narrow the interval."""
    tokens = make(num_groups=20)
    doubled = PooledTokens(
        *(np.concatenate([getattr(tokens, name)] * 2) for name in ("group", "native", "replayed", "flipped_layers"))
    )
    twice, once = (pooled(one, resamples=200)["all/native_k3"] for one in (doubled, tokens))
    # The sums of twice as many tokens are rounded otherwise.
    assert dataclasses.astuple(twice) == pytest.approx(dataclasses.astuple(once), rel=1e-9)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    truth = np.exp(0.05**2 / 2) - 1
    hits = 0
    for seed in range(60):
        x = np.random.default_rng(seed).normal(0, 0.05, 1600)
        tokens = PooledTokens(np.repeat(np.arange(80), 20), x, x, np.zeros(1600, int))
        interval = pooled(tokens, resamples=400, confidence=0.9, seed=seed)["all/native_k3"]
        hits += interval.low <= truth <= interval.high
    assert 45 <= hits <= 60


def test_no_flips_no_flipped_figures_and_no_mismatch_is_not_an_error() -> None:
    tokens = PooledTokens(np.arange(4), np.zeros(4), np.zeros(4), np.zeros(4, int))
    with pytest.raises(MoeTrmError, match="cannot be pooled"):
        pooled(PooledTokens(np.arange(1), np.array([np.nan]), np.zeros(1), np.zeros(1, int)))
    got = pooled(tokens, resamples=50)
    assert got["all/native_k3"].value == 0
    assert got.keys() == {"all/native_k3", "all/replayed_k3", "token_flip_rate"}


def test_load_keeps_prompts_of_different_steps_apart(tmp_path: Path) -> None:
    for step, rank in ((2, 0), (2, 1), (4, 0)):
        arrays = {
            "group_id": np.array([rank, rank, rank + 1], np.int64),
            "native": np.full(3, step, np.float32),
            "replayed": np.zeros(3, np.float32),
            "flipped_layers": np.zeros(3, np.int16),
            "log_kept_mass": np.zeros(3, np.float32),
        }
        save_file(arrays, tmp_path / f"step-{step:06d}-rank{rank}.safetensors")
    tokens = load(tmp_path)
    assert tokens.native.tolist() == [2.0] * 6 + [4.0] * 3
    assert tokens.group.tolist() == [0, 0, 1, 1, 1, 2, 3, 3, 4]
    with pytest.raises(MoeTrmError, match="no probe arrays"):
        load(tmp_path / "nowhere")
