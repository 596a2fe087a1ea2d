"""The deep start, and noise that flips as many token-layers as rounding does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.evidence import matched_noise, start
from moe_trm.models.tiny.checkpoint import BOS, PAD, TinyShape, character_tokenizer

SHAPE = TinyShape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=8, top_k=2, expert_ffn=16)


def test_noise_is_matched_to_a_format_on_a_start_from_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matched_noise, "PROBLEMS", 12)
    monkeypatch.setattr(matched_noise, "DRAWS", 2)
    start.make(SHAPE, tmp_path, replace(start.DEEP_RECIPE, batch_size=4), steps=2)
    rounded, noise = matched_noise.measure(tmp_path, "int4")
    assert 0.05 < float(rounded["flipped"]) < 0.9
    assert float(noise["flipped"]) == pytest.approx(float(rounded["flipped"]), rel=0.1)
    assert 0 < float(noise["noise"]) < 1


def test_the_sums_are_read_with_their_working() -> None:
    ids, valid = matched_noise.solved_sums()
    assert ids.shape == valid.shape
    assert bool((ids[~valid] == PAD).all())
    assert bool((ids[:, 0] == BOS).all())
    text = character_tokenizer().decode(ids[0][valid[0]][1:].tolist())
    problem, _, answer = text.partition("=")
    parts = problem.replace("-", "+-").split("+")
    assert sum(int(part) for part in parts) == int(answer.rpartition("#")[2].replace("~", "-"))
