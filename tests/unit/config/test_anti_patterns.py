"""Each anti-pattern planted alone and with others, as settings and as metrics; none where nothing was planted."""

from __future__ import annotations

import logging
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from moe_trm.config import resolve
from moe_trm.config.anti_patterns import ANTI_PATTERNS, found, planned
from moe_trm.config.load import load
from moe_trm.config.rules import warnings
from moe_trm.config.schema import Config

REPOSITORY = Path(__file__).parents[3]
CONFIGS = sorted([*(REPOSITORY / "configs").rglob("*.yaml"), *(REPOSITORY / "examples").glob("*/config.yaml")])
ASYNC = {"mode": "async", "max_staleness": 4}
CALM = {"engine/probs_diff_max": 0.3, "loss/pg_clipfrac": 0.05, "response/length_mean": 100.0}

PLANTED: dict[str, dict[str, Any]] = {
    "unchecked KL": {"pipeline": {"mode": "async", "behavior": "merged"}, "probe": {"every": 0}},
    "products of long rows": {"correction": {"rules": [{"name": "seq_tis"}]}, "rollout": {"max_new_tokens": 513}},
    "far ahead, uncorrected": {"pipeline": ASYNC},
    "sums over long rows": {
        "correction": {"rules": [{"name": "seq_sum_k3", "thresholds": {"upper": 1.0}}]},
        "rollout": {"max_new_tokens": 513},
    },
    "replay at one step": {"learner": {"minibatches": 1}, "replay": {"mode": "R3"}},
    "bypass with R2": {"correction": {"preset": "bypass_ppo_clip"}, "replay": {"mode": "R2"}},
}
"""Settings that show each row which settings show."""
MEASURED: dict[str, tuple[dict[str, Any], list[dict[str, float]]]] = {
    "products of long rows": (
        {"correction": {"rules": [{"name": "seq_tis"}]}},
        [CALM | {"correction/weight_eff_sample_size": 0.4, "variance/pure_noise": 1.0 + step} for step in range(20)],
    ),
    "wide clip": ({"loss": {"clip_high": 0.4}}, [CALM | {"loss/pg_clipfrac": 0.25}]),
    "unguarded surge": ({}, [CALM] * 100 + [CALM | {"response/length_mean": 121.0}]),
    "maximum averaged away": ({}, [CALM] * 9 + [CALM | {"engine/probs_diff_max": 0.95}, CALM]),
}


def config(*settings: dict[str, Any]) -> Config:
    merged: dict[str, Any] = {"model": {"checkpoint": "none"}}
    for each in settings:
        for section, values in each.items():
            before = merged.get(section, {})
            rules = [*before.get("rules", []), *values.get("rules", [])]
            merged[section] = {**before, **values, **({"rules": rules} if rules else {})}
    return Config.model_validate(merged)


def names(found_rows: Any) -> set[str]:
    return {row.name for row in found_rows}


def test_every_row_is_planted_and_says_why_and_what_to_try() -> None:
    assert names(ANTI_PATTERNS) == {*PLANTED, *MEASURED}
    assert len(ANTI_PATTERNS) == len(names(ANTI_PATTERNS)) == 9
    for row in ANTI_PATTERNS:
        assert len(row.reason) > 30
        assert row.advice


@pytest.mark.parametrize("name", PLANTED)
def test_settings_show_it_alone(name: str) -> None:
    chosen = config(PLANTED[name])
    assert names(found(chosen, [CALM])) == {name}
    assert names(planned(chosen)) == {name}
    told = [line for line in warnings(chosen) if line.startswith("anti-pattern")]
    assert len(told) == (0 if name == "bypass with R2" else 1)


@pytest.mark.parametrize("name", MEASURED)
def test_metrics_show_it_alone_and_no_other_settings_do(name: str) -> None:
    settings, history = MEASURED[name]
    assert names(planned(config(settings))) == set()
    assert names(found(config(settings), history)) == {name}
    assert found(config(settings), [CALM]) == found(config(settings), []) == []


@pytest.mark.parametrize(("one", "other"), list(combinations(PLANTED, 2)))
def test_two_at_once_are_both_named(one: str, other: str) -> None:
    """Unless one of them mends the other: samples that are old are no fresh ones, a rule on lag is a correction."""
    pair, expected = {one, other}, {one, other}
    if pair == {"unchecked KL", "far ahead, uncorrected"}:
        chosen = config({"pipeline": ASYNC | {"behavior": "merged"}, "probe": {"every": 0}})
    else:
        chosen = config(PLANTED[one], PLANTED[other])
    if "replay at one step" in pair and pair & {"unchecked KL", "far ahead, uncorrected"}:
        expected -= {"replay at one step"}
    if pair == {"replay at one step", "bypass with R2"}:
        expected = {"bypass with R2"} if other == "bypass with R2" else {"replay at one step"}
    if pair == {"far ahead, uncorrected", "bypass with R2"}:
        expected = {"bypass with R2"}
    assert names(found(chosen, [])) == expected


def test_all_that_metrics_show_at_once() -> None:
    settings = [settings for settings, _ in MEASURED.values()]
    last = {"response/length_mean": 121.0, "loss/pg_clipfrac": 0.3}
    noisy = [{"correction/weight_eff_sample_size": 0.4, "variance/pure_noise": float(step)} for step in range(101)]
    history = [{**CALM, **each, **(last if step == 100 else {})} for step, each in enumerate(noisy)]
    history[50] = {**history[50], "engine/probs_diff_max": 0.95}
    assert names(found(config(*settings), history)) == {*MEASURED}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"pipeline": ASYNC | {"max_staleness": 3}}, False),
        ({"pipeline": ASYNC, "correction": {"preset": "disabled"}}, True),
        ({"pipeline": ASYNC, "correction": {"preset": "decoupled_token_is"}}, False),
        ({"pipeline": ASYNC, "correction": {"preset": "bypass_pg_is"}}, False),
        ({"pipeline": ASYNC, "correction": {"preset": "bypass_ppo_clip"}}, False),
        ({"pipeline": ASYNC, "correction": {"rules": [{"name": "token_tis"}]}}, True),
        ({"pipeline": ASYNC, "correction": {"rules": [{"name": "token_tis", "thresholds": {"ratio": "lag"}}]}}, False),
        (
            {"pipeline": ASYNC, "correction": {"rules": [{"name": "token_tis", "thresholds": {"ratio": "update"}}]}},
            True,
        ),
        ({"pipeline": ASYNC, "correction": {"rules": [{"name": "m2po"}]}}, False),
        ({"pipeline": ASYNC, "correction": {"rules": [{"name": "my.py:rule"}]}}, False),
        ({"pipeline": ASYNC, "loss": {"name": "vespo"}}, False),
        ({"pipeline": ASYNC, "loss": {"name": "vespo", "parameters": {"ratio": "update"}}}, True),
        ({"pipeline": ASYNC, "loss": {"name": "gspo"}}, True),
        ({"pipeline": ASYNC, "loss": {"name": "reinforce"}}, True),
        ({"pipeline": ASYNC, "loss": {"name": "minirl"}}, False),
        ({"pipeline": ASYNC, "loss": {"name": "my.py:loss"}}, False),
        ({"pipeline": ASYNC, "loss": {"parameters": {"ratio": "staleness"}}}, False),
        ({"pipeline": ASYNC | {"behavior": "bypass"}, "probe": {"every": 5}}, True),
        ({"pipeline": ASYNC | {"behavior": "interpolate"}, "probe": {"every": 5}}, False),
    ],
)
def test_what_answers_to_lag(settings: dict[str, Any], told: bool) -> None:
    assert ("far ahead, uncorrected" in names(planned(config(settings)))) is told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rollout": {"max_new_tokens": 512}}, False),
        ({"rollout": {"max_new_tokens": 513}}, True),
        ({"rollout": {"max_new_tokens": 100, "function": "my.py:talk", "max_turns": 6}}, True),
        ({"rollout": {"max_new_tokens": 100, "function": "my.py:talk", "max_turns": 6, "max_tokens": 400}}, False),
    ],
)
def test_how_long_a_row_may_be(settings: dict[str, Any], told: bool) -> None:
    chosen = config(settings, {"correction": {"preset": "decoupled_seq_is_rs"}})
    assert names(planned(chosen)) == ({"products of long rows", "sums over long rows"} if told else set())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"loss/pg_clipfrac": 0.2}, "wide clip"),
        ({"loss/pg_clipfrac": math.nan}, "wide clip"),
        ({"response/length_mean": 120.0}, "unguarded surge"),
        ({"engine/probs_diff_max": 0.8}, "maximum averaged away"),
    ],
)
def test_limits_belong_to_what_is_in_order(changes: dict[str, float], name: str) -> None:
    settings = MEASURED[name][0]
    assert found(config(settings), [CALM] * 100 + [CALM | changes]) == []


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"name": "seq_sum_k2", "thresholds": {"upper": 1.0}}, True),
        ({"name": "seq_sum_k2", "target_reject_rate": 0.1}, True),
        ({"name": "seq_sum_k2", "target_reject_rate": 0.1, "by_length": True}, False),
        ({"name": "opsm", "thresholds": {"delta": 0.1, "score": "sum"}}, True),
        ({"name": "opsm", "thresholds": {"delta": 0.1, "score": "mean"}}, False),
        ({"name": "seq_mean_k2", "thresholds": {"upper": 1.0}}, False),
    ],
)
def test_which_rules_add_up_over_a_row(rule: dict[str, Any], told: bool) -> None:
    chosen = config({"correction": {"rules": [rule]}, "rollout": {"max_new_tokens": 4096}})
    assert names(planned(chosen)) == ({"sums over long rows"} if told else set())


def test_what_is_always_far_off_is_no_average() -> None:
    assert found(config(), [CALM | {"engine/probs_diff_max": 0.95}] * 5) == []


def test_what_guards_is_not_told() -> None:
    surge = MEASURED["unguarded surge"][1]
    assert found(config({"optimizer": {"surge_limit": 1.2}}), surge) == []
    clipped = MEASURED["wide clip"][1]
    for usual in ({"clip_high": 0.28}, {"name": "gspo", "clip_high": 0.4}, {}):
        assert found(config({"loss": usual}), clipped) == []
    assert names(found(config({"loss": {"clip_low": 0.3}}), clipped)) == {"wide clip"}
    noisy = MEASURED["products of long rows"][1]
    assert found(config(), noisy) == []
    effective = [step | {"correction/weight_eff_sample_size": 0.6} for step in noisy]
    assert found(config({"correction": {"rules": [{"name": "seq_tis"}]}}), effective) == []
    assert found(config(PLANTED["products of long rows"], {"rollout": {"max_new_tokens": 64}}), noisy[:3]) == []
    for alone in ({"learner": {"epochs": 2, "minibatches": 1}}, {"learner": {"minibatches": 2}}):
        assert names(planned(config(PLANTED["replay at one step"], alone))) <= {"replay at one step"}
    assert not list(planned(config({"learner": {"epochs": 2, "minibatches": 1}})))
    assert not list(planned(config({"learner": {"minibatches": 1}, "replay": {"mode": "R2"}})))
    assert not list(planned(config(PLANTED["unchecked KL"], {"probe": {"every": 10}})))
    for checked in ({"mode": "sync"}, {"behavior": "snapshot"}):
        assert not list(planned(config(PLANTED["unchecked KL"], {"pipeline": checked})))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_configurations_show_none(path: Path) -> None:
    assert found(resolve(path).config, []) == []


def test_launch_warns_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {checkpoint: none}\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        load(file, ["pipeline.mode=async", "pipeline.max_staleness=5", "replay.mode=R3"])
    [said] = [line for line in caplog.messages if "anti-pattern" in line]
    assert "far ahead, uncorrected" in said
    assert "try correction.preset=decoupled_token_is" in said
    assert not [line for line in resolve(file).warnings if "anti-pattern" in line]


def test_the_page_has_every_row() -> None:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for row in ANTI_PATTERNS:
        assert f"| {row.name} |" in page
