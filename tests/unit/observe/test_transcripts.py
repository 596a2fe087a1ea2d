"""Transcripts hold the very numbers of record, ratio and correction, and mark what is whose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_trm.config.schema import Config
from moe_trm.observe.report.token_rows import transcript
from moe_trm.observe.transcripts import Transcripts, open_transcripts
from moe_trm.ratios import LogRatios
from tests.unit.observe.made_transcripts import Letters, judged, made_transcripts, rows, sampled_places
from tests.unit.observe.report.page_reader import PageReader


def test_every_number_is_that_of_record_ratio_and_correction(tmp_path: Path) -> None:
    page = PageReader(made_transcripts(tmp_path).with_suffix(".html").read_text())
    given = rows()
    batch, evidence, correction = judged(given)
    by_sample = {row.record.sample_id: (place, row) for place, row in enumerate(given)}
    assert len(page.data["rollouts"]) == 3
    for told in page.data["rollouts"]:
        place, row = by_sample[told["sample_id"]]
        own = sampled_places(row)
        columns = [position - 1 for position in own]
        assert told["ids"] == row.record.tokens.tolist()
        assert [told["rollout_logprobs"][position] for position in own] == row.record.rollout_logprobs.tolist()
        assert [told["log_ratio"][position] for position in own] == evidence.ratios.engine[place, columns].tolist()
        assert [told["weight"][position] for position in own] == correction.weights[place, columns].tolist()
        assert [told["keep"][position] for position in own] == correction.keep[place, columns].tolist()
        others = set(range(row.record.num_tokens)) - set(own)
        assert {told["log_ratio"][position] for position in others} == {None}
        assert batch.mask[place].sum() == len(own)


def test_the_expected_answer_and_every_part_of_the_reward_are_shown(tmp_path: Path) -> None:
    parts = {"right": 0.5, "brief": -0.25}
    given = [
        replace(row, record=replace(row.record, reward=0.25, reward_parts=parts, expected="4 < " + "5" * 500))
        for row in rows()[:1]
    ]
    _, evidence, correction = judged(given)
    sink = Transcripts(tmp_path, "nowhere", every=1, rollouts=1, decoder=Letters())
    sink.judged(given, evidence, correction)
    sink.write(1, {})
    path = tmp_path / "transcripts" / "step-000001"
    text = path.with_suffix(".txt").read_text()
    assert "reward 0.25 (right 0.5, brief -0.25), advantage" in text
    assert f"expected answer: 4 < {'5' * 396} ...\n" in text
    page = PageReader(path.with_suffix(".html").read_text())
    [shown] = page.data["rollouts"]
    assert shown["reward_parts"] == parts
    assert shown["expected"].endswith("5" * 500)
    assert f"expected answer: 4 &lt; {'5' * 396} ..." in path.with_suffix(".html").read_text()


def test_different_prompts_come_first(tmp_path: Path) -> None:
    page = PageReader(made_transcripts(tmp_path).with_suffix(".html").read_text())
    assert [told["sample_id"] for told in page.data["rollouts"]] == [0, 3, 1]


def test_given_tokens_are_visible_as_such(tmp_path: Path) -> None:
    path = made_transcripts(tmp_path)
    page = PageReader(path.with_suffix(".html").read_text())
    tool = page.data["rollouts"][2]
    assert tool["kinds"] == ["prompt"] * 4 + ["sampled"] * 4 + ["given"] * 4 + ["sampled"] * 18
    assert path.with_suffix(".html").read_text().count('<span class="given">') == 4 + 1  # and the legend's
    texts = path.with_suffix(".txt").read_text()
    letters = "".join(tool["texts"][8:12])
    assert "{" + letters + "}" in texts
    assert "[-" in texts
    assert "=== sample 1 of prompt prompt-0: reward 1" in texts


def test_every_so_many_steps_and_the_first(tmp_path: Path) -> None:
    sink = Transcripts(tmp_path, "nowhere", every=3, rollouts=1, decoder=Letters())
    given = rows()
    _, evidence, correction = judged(given)
    sink.write(0, {})
    for step in range(1, 8):
        sink.judged(given, evidence, correction)
        sink.write(step, {})
    assert sorted(path.name for path in (tmp_path / "transcripts").glob("*.html")) == [
        "step-000001.html",
        "step-000003.html",
        "step-000006.html",
    ]


def test_a_run_that_begins_anew_or_goes_on_drops_later_transcripts(tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"checkpoint": "nowhere"}})
    path = made_transcripts(tmp_path)
    open_transcripts(config.observe, config.model, tmp_path, first_step=1)
    assert path.with_suffix(".html").is_file()
    open_transcripts(config.observe, config.model, tmp_path, first_step=0)
    assert list(path.parent.iterdir()) == []


def test_where_engine_and_lag_are_not_known_apart_the_ratio_is_called_merged() -> None:
    given = rows()[:1]
    batch, evidence, correction = judged(given)
    learner = batch.rollout_logprobs + 0.25
    merged = replace(evidence, ratios=LogRatios(batch.rollout_logprobs, None, learner, batch.mask, learner))
    told = transcript(given[0], 0, merged, correction)
    assert told.ratio == "merged"
    assert list(told.log_ratio[4:]) == pytest.approx([0.25] * 6)


def test_tokens_that_are_not_scored_have_no_ratio() -> None:
    given = rows()[:1]
    _, evidence, correction = judged(given)
    evidence.ratios.mask[0, 5] = False
    told = transcript(given[0], 0, evidence, correction)
    assert told.log_ratio[6] is None
    assert told.keep[6] is None
    assert told.kinds[6] == "sampled"
    assert told.log_ratio[5] == pytest.approx(float(evidence.ratios.engine[0, 4]))
