"""The gradient oracle: its estimator by hand, its controls, and its arms on a tiny mixture of experts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.evidence import gradient_oracle as oracle
from benchmarks.evidence.oracle_answers import TOKENIZER, advantages, engines, problems, sample, served
from benchmarks.evidence.oracle_arms import ARMS, MASKS, RANDOM, REJECTED, gradients, on_policy, policy_gradient
from benchmarks.evidence.split_half import Halves, cosine, holm, inner, progress_share, student_p
from moe_trm.models.tiny.checkpoint import EOS, TinyShape, save, tiny_model

SHAPE = TinyShape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, experts=4, top_k=2, expert_ffn=16)


@pytest.fixture(scope="module")
def causal() -> Any:
    model = tiny_model(0, SHAPE).eval()
    model.set_experts_implementation("grouped_mm")
    return model


def halves(first: list[float], second: list[float], number: int = 4) -> Halves:
    return Halves(torch.tensor(first), torch.tensor(second), number)


def test_a_cosine_by_hand() -> None:
    left, right = halves([1.0, 2.0], [2.0, 1.0]), halves([3.0, 0.0], [1.0, 1.0])
    assert inner(left, right) == (1 * 1 + 2 * 1 + 2 * 3 + 1 * 0) / 2
    assert inner(left, left) == 1 * 2 + 2 * 1
    assert cosine(left, right) == pytest.approx(4.5 / math.sqrt(4 * 3))
    assert math.isnan(cosine(left, halves([1.0, 0.0], [-1.0, 0.0]))), "noise alone"
    assert left.variance == 2 * 4 / 4


def test_noise_does_not_lower_a_cosine() -> None:
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(4000, generator=draw)

    def estimate() -> Halves:
        first, second = (truth + 2 * torch.randn(4000, generator=draw) for _ in range(2))
        return Halves(first, second, 8)

    left, right = estimate(), estimate()
    assert cosine(left, right) == pytest.approx(1, abs=0.1)
    plain = torch.cosine_similarity(left.first + left.second, right.first + right.second, 0)
    assert float(plain) < 0.4
    assert left.variance == pytest.approx(4 * 4 * 4000, rel=0.1), "of an answer, from means of four"


def test_progress_is_all_on_policy_and_less_with_a_bias_or_with_noise() -> None:
    own = halves([4.0, 1.0], [4.0, -1.0])
    assert progress_share(own, own, 2) == pytest.approx(1)
    biased = halves([4.0, 4.0], [4.0, 2.0])
    assert inner(biased - own, biased - own) == 9
    assert progress_share(biased, own, 2) == pytest.approx((15**2 / (4 / 2 + 9)) / (15**2 / (4 / 2)))
    assert progress_share(halves([4.0, 3.0], [4.0, -3.0]), own, 2) < 1


def test_p_values_by_hand() -> None:
    assert student_p([1.0, 2.0, 3.0]) == pytest.approx(0.0742, abs=1e-4), "t = 3.464 with two degrees of freedom"
    assert student_p([0.1, -0.1]) == pytest.approx(1)
    assert student_p([1.0, 1.0]) == 0
    corrected = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert corrected == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few short answers, half of them right whatever they say."""
    for name, value in {
        "PROMPTS": 4,
        "GROUP": 4,
        "ORACLE_GROUP": 8,
        "BATCH": 8,
        "MAX_NEW": 6,
        "UPDATES": (0, 2),
    }.items():
        monkeypatch.setattr(oracle, name, value)
    monkeypatch.setattr("benchmarks.evidence.oracle_answers._solved", lambda _problem, row: row[0] % 2 == 0)


def test_answers_end_once_and_compare_with_the_others_of_their_prompt(causal: Any) -> None:
    asked = problems(2, "any")
    assert {len(each.prompt) for each in asked} == {8}
    answers = sample(causal, asked, 3, 5, seed=1)
    assert answers.ids.shape[0] == 6
    assert torch.equal(answers.ids, sample(causal, asked, 3, 5, seed=1).ids)
    ends = (answers.targets == EOS) & answers.sampled
    assert bool((ends.sum(1) <= 1).all())
    assert not answers.sampled[:, :8].any(), "the prompt is not sampled"
    assert bool(answers.valid[:, :9].all())
    made = advantages(torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 3.0]), 3, 2)
    assert made[:, 0].tolist() == [0.75, -0.75, 0.0, -1.5, -1.5, 3.0]
    assert made[:, 1].tolist() == made[:, 0].tolist()


def test_each_engine_differs_from_the_learner_as_it_says(causal: Any) -> None:
    kinds = engines(0.2, 0)
    gate, expert = "model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.down_proj"

    def weights(name: str, version: int = 0) -> Mapping[str, torch.Tensor]:
        return dict(served(causal, kinds[name].at(version)).named_parameters())

    own = dict(causal.named_parameters())
    assert torch.equal(weights("bf16")[gate].float(), own[gate].bfloat16().float())
    for name in ("fp8", "int4"):
        assert not torch.equal(weights(name)[expert].float(), own[expert].bfloat16().float())
    assert torch.equal(weights("noise")[expert], own[expert])
    assert not torch.equal(weights("noise")[gate], own[gate])
    assert torch.equal(weights("noise")[gate], weights("noise", 3)[gate])
    assert not torch.equal(weights("noise_each_push")[gate], weights("noise_each_push", 3)[gate])
    assert served(causal, kinds["bf16"]).model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.usefixtures("small")
def test_without_a_mismatch_every_arm_is_the_gradient_on_policy(causal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "engines", lambda _noise, seed: {"same": engines(0.0, seed)["noise"]})
    batches, engine, facts = oracle.answered(causal, "same", 0)
    found = gradients(causal, batches, moved=False, seed=0)
    own = torch.stack([policy_gradient(causal, batch.answers) for batch in batches if batch.half == 0]).mean(0)
    assert facts["flipped"] == 0
    assert found.k3 == pytest.approx({"native": 0, "R3": 0}, abs=1e-9)
    for arm in set(ARMS) - set(MASKS) - {RANDOM}:
        torch.testing.assert_close(found.arms[arm].first, own, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(engine.first, own, atol=1e-5, rtol=1e-3)


@pytest.mark.usefixtures("small")
def test_the_control_on_policy_is_one(causal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GROUP": 512, "BATCH": 512, "MAX_NEW": 1}.items():
        monkeypatch.setattr(oracle, name, value)
    draws = [on_policy(causal, oracle.own_answers(causal, 512, 0, name, 0)) for name in ("oracle", "arm")]
    assert draws[0].num_answers == 2 * 4 * 512
    assert oracle.judged(draws[1], draws[0], None)["learner"] == pytest.approx(1, abs=0.15)
    cells = [
        {"checkpoint": n, "engine": oracle.ON_POLICY, "arms": {oracle.ON_POLICY: {"learner": 1.0 + n}}}
        for n in (0, 1, 1)
    ]
    assert oracle.control(cells)[0]["mean"] == 1.5


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_it_goes_on_where_it_was_stopped(
    causal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(_begin: Path, folder: Path, _recipe: object, _steps: int, seed: int) -> None:
        assert seed == 20
        save(causal, TOKENIZER, folder)

    kinds = {name: rounding for name, rounding in engines(0.2, 0).items() if name in ("bf16", "noise_each_push")}
    monkeypatch.setattr(oracle, "engines", lambda _noise, _seed: kinds)
    monkeypatch.setattr("benchmarks.evidence.start.make", make)
    cells = tmp_path / "cells.jsonl"
    oracle.run(0, tmp_path, tmp_path / "checkpoint", cells)
    lines = cells.read_text().splitlines()
    assert [(cell["engine"], cell["updates"]) for cell in oracle.read(cells)] == [
        (name, ahead) for name in (oracle.ON_POLICY, *kinds) for ahead in (0, 2)
    ]
    cells.write_text("\n".join(lines[:3]) + "\n")
    capsys.readouterr()
    oracle.run(0, tmp_path, tmp_path / "checkpoint", cells)
    assert len(capsys.readouterr().out.splitlines()) == 3, "three cells were left"
    again = oracle.read(cells)
    assert again[3]["arms"]["R3"] == pytest.approx(json.loads(lines[3])["arms"]["R3"], rel=0.02, nan_ok=True)
    assert set(again[3]["arms"]) == set(ARMS)
    oracle.run(0, tmp_path, tmp_path / "nothing", cells)
    assert len(oracle.read(cells)) == 6


@pytest.mark.usefixtures("small")
def test_masks_drop_a_fifth_and_leave_the_rest_as_it_was(causal: Any) -> None:
    batches, _, facts = oracle.answered(causal, "noise", 0)
    assert facts["flipped"] > 0
    found = gradients(causal, batches, moved=False, seed=5)
    size = sum(len(batch.answers.ids) for batch in batches)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(5))
    dropped = (order < round(REJECTED * size)).split([len(batch.answers.ids) for batch in batches])
    kept = [
        batch.rows((~drop).nonzero()[:, 0]) for batch, drop in zip(batches, dropped, strict=True) if batch.half == 0
    ]
    by_hand = sum(policy_gradient(causal, part.answers) * len(part.answers.ids) for part in kept) / (size / 2)
    torch.testing.assert_close(found.arms[RANDOM].first, by_hand, atol=1e-5, rtol=1e-3)
    assert found.k3["R3"] < found.k3["native"]
    for arm in MASKS:
        assert not torch.equal(found.arms[arm].first, found.arms["none"].first)


@pytest.mark.usefixtures("small")
def test_learners_move_with_their_updates(causal: Any) -> None:
    learners = oracle.updated(causal, 0)
    assert set(learners) == {0, 2}
    assert learners[0] is causal
    pairs = zip(causal.parameters(), learners[2].parameters(), strict=True)
    apart = max(float((before - after).detach().abs().max()) for before, after in pairs)
    assert 0 < apart <= 2.5 * oracle.RATE


def cell(number: int, name: str, ahead: int, shift: float) -> dict[str, Any]:
    arms = {arm: {"learner": 0.5, "engine": 0.4, "progress": 0.3, "square": 4.0, "along": 1.0} for arm in ARMS}
    arms["R3"] = {**arms["R3"], "learner": 0.5 + shift + 0.01 * ahead}
    return {"checkpoint": number, "engine": name, "updates": ahead, "arms": arms}


def test_contrasts_are_means_and_slopes_over_whole_checkpoints() -> None:
    cells = [cell(number, "int4", ahead, 0.1 * number) for number in range(3) for ahead in oracle.UPDATES]
    rows = oracle.contrasts([*cells, cell(3, "int4", 0, 9.0)])
    by_name = {str(row["contrast"]): row for row in rows}
    assert by_name["int4: R3 - none"]["mean"] == pytest.approx(0.1 + 0.01 * np.mean(oracle.UPDATES))
    assert by_name["int4: (R3 - R2) by updates"]["mean"] == pytest.approx(0.01)
    assert {row["checkpoints"] for row in rows} == {3}, "a checkpoint that lacks cells does not count"
    assert len(rows) == 3 + len(MASKS)
    assert float(by_name["int4: R3 - none"]["p_holm"]) >= float(by_name["int4: R3 - none"]["p"])
    summary = oracle.summary(cells)
    assert {row["arm"] for row in summary} == set(ARMS)
    assert {row["pooled"] for row in summary} == {0.5}
    uneven = [{"square": 1.0, "along": 1.0}, {"square": 0.25, "along": 0.0}]
    assert oracle.pooled(uneven) == pytest.approx(0.5 / math.sqrt(0.625))
    assert math.isnan(oracle.pooled([{"square": -0.1, "along": 0.0}]))
    assert "int4" in oracle.draw(summary)
