"""The experiment on length: its sums, its start, and the rules that drop rows at random."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.evidence import addends
from benchmarks.evidence.addends import OCTAVES, Addends
from benchmarks.evidence.length_rules import random_rows, random_rows_like_trm_max
from benchmarks.evidence.suites import SOLUTION_TOKENS
from moe_trm import corrections
from moe_trm.corrections import Evidence
from moe_trm.corrections.by_length import octave_of
from moe_trm.errors import MoeTrmError
from moe_trm.ratios import LogRatios


def test_a_sum_is_worked_out_by_running_totals() -> None:
    problem = Addends((12, 7, 45))
    assert (problem.prompt, problem.answer, problem.solution) == ("a12b7c45=", "64", "b12+7=19,c19+45=64#64")
    assert tuple(OCTAVES) == tuple(SOLUTION_TOKENS)
    rng = random.Random(0)
    lengths = {}
    for octave, (fewest, most, digits) in OCTAVES.items():
        drawn = [addends.draw(rng, octave) for _ in range(200)]
        assert {len(each.numbers) for each in drawn} == set(range(fewest, most + 1))
        assert {len(str(number)) for each in drawn for number in each.numbers} == {digits}
        lengths[octave] = sum(len(each.solution) for each in drawn) / len(drawn)
    assert list(lengths.values()) == sorted(lengths.values()), "more addends, longer answers"
    assert lengths["sixteen"] > 5 * lengths["two"]


def test_held_out_sums_are_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addends, "TRAINED", 400)
    addends.write(tmp_path)
    prompts = {
        name: {json.loads(line)["prompt"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
        for name in (*OCTAVES, "train")
    }
    assert len(prompts["train"]) == 400
    for octave in OCTAVES:
        assert len(prompts[octave]) == addends.HELD_OUT
        assert not prompts[octave] & prompts["train"]


def test_a_start_that_does_not_solve_half_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BATCH_TOKENS": 60, "CHECKED": 2, "CHECK_EVERY": 1, "MAX_NEW": 2}.items():
        monkeypatch.setattr(addends, name, value)
    with pytest.raises(MoeTrmError, match="does not solve half"):
        addends.make(tmp_path / "start", max_steps=1)
    monkeypatch.setattr(addends, "success", lambda *_: addends.ENOUGH)
    addends.make(tmp_path / "start", max_steps=1)
    assert (tmp_path / "start" / "config.json").exists()


def evidence(seed: int) -> Evidence:
    """256 rows of 8 to 127 tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 128, (256, 1), generator=draw)
    mask = torch.arange(128) < lengths
    rollout = -torch.rand(256, 128, generator=draw)
    current = rollout + 0.1 * torch.randn(256, 128, generator=draw)
    return Evidence(LogRatios(rollout, rollout, current, mask), torch.ones(256, 128))


def kept(rule: corrections.RegisteredRule, own: Evidence) -> torch.Tensor:
    bound = corrections.calibrate(rule, [corrections.scores(rule, own)], 0.2)
    return bound(own).keep.any(1)


def test_random_rows_know_nothing_of_lengths_and_the_profile_only_of_them() -> None:
    own = evidence(0)
    trm = kept(corrections.get("trm_max"), own)
    anyhow, profile = kept(random_rows, own), kept(random_rows_like_trm_max, own)
    for keep in (trm, anyhow, profile):
        assert float((~keep).float().mean()) == pytest.approx(0.2, abs=0.01)
    octaves = octave_of(own.mask.sum(1))
    for octave in octaves.unique():
        rows = octaves == octave
        assert int(profile[rows].sum()) == int(trm[rows].sum()), "as many of each length"
    assert not torch.equal(profile, trm)
    assert torch.equal(kept(random_rows, own), anyhow), "the same again"
    assert not torch.equal(kept(random_rows, evidence(1)), anyhow)
