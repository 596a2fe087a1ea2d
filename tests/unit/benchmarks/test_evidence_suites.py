"""The suites of runs: arms that differ by what they are about alone, and their figures."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.evidence import addends, suite_figures
from benchmarks.evidence.suites import (
    ENGINE_K3,
    RIGHT_LENGTH,
    SAMPLED,
    SOLUTION_TOKENS,
    SUITES,
    TAIL,
    UNROUNDED,
    Suite,
)
from moe_trm.run_folder.run import Row, Run
from moe_trm.tools.experiment.arms import Arm
from moe_trm.tools.experiment.plan import ExperimentPlan, make_plan
from moe_trm.tools.experiment.progress import RunState

FOLDER = suite_figures.FILE.parent
ABOUT = {
    "staleness": ("correction.", "replay.mode", "pipeline.mode", "pipeline.max_staleness"),
    "dose": ("correction.", "replay.mode", "rollout.fake_quantization"),
    "precision": ("learner.dtype", "rollout.server.dtype"),
    "decay": ("optimizer.lr", "optimizer.schedule", "optimizer.decay_steps"),
    "phase_map": ("learner.minibatches", "replay.mode", "loss.clip_"),
    "router_noise": ("correction.", "replay.", "rollout.fake_router_noise", "loss.", "optimizer.lr"),
    "router_noise_float32": ("replay.",),
    "full_collapse": ("replay.", "optimizer.lr"),
    "published_dose": ("replay.", "rollout.fake_router_noise"),
    "natural_rounding": ("replay.", "rollout.fake_"),
    "answer_length": ("correction.",),
    "losses": ("loss.", "correction.", "advantage.name", "optimizer.ess_scale", "pipeline."),
    "top_p": ("sampling_mask.mode",),
}
"""Settings by which the arms of a suite may differ."""


@pytest.fixture(scope="module")
def plans() -> Mapping[str, ExperimentPlan]:
    return {name: make_plan(FOLDER / f"{name}.yaml", check=lambda _config, _ranks: None) for name in SUITES}


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_compares_what_it_says(plans: Mapping[str, ExperimentPlan], name: str) -> None:
    plan, suite = plans[name], SUITES[name]
    assert plan.file.name == name
    assert len(plan.file.seeds) >= 3
    assert suite.late <= plan.file.steps <= 500
    for config in plan.configs.values():
        assert config.task.eval_size >= 256
        assert config.eval.samples
        assert config.train.eval_every == (20 if name == "answer_length" else 0)
    for arm in plan.file.arms:
        assert all(key.startswith(ABOUT[name]) for key in plan.apart(arm)), arm
    compared = {*suite.against, *(other for others in suite.against.values() for other in others)}
    assert compared | {each for gains in suite.crossings for gain in gains for each in gain} <= set(plan.file.arms)
    assert suite.compared[0].metrics == (plan.file.primary_metric,)
    assert {figure.by for figure in suite.compared} == {None, *plan.file.evaluations}, "both policies"
    assert len(plan.file.evaluations) == 1
    assert all(config.train.export for config in plan.configs.values())
    assert [run.seed for run in plan.runs] == sorted(run.seed for run in plan.runs), "seed by seed"


def test_rules_of_stale_arms_read_engines_and_lag_in_one(plans: Mapping[str, ExperimentPlan]) -> None:
    plan = plans["staleness"]
    assert len(plan.file.seeds) >= 4
    rules = [rule for config in plan.configs.values() for rule in config.correction.rules]
    assert all(rule.thresholds["ratio"] == "merged" and rule.target_reject_rate is None for rule in rules)


def test_doses_stand_beside_a_control_without_any(plans: Mapping[str, ExperimentPlan]) -> None:
    configs = plans["dose"].configs
    assert configs["float32"].rollout.fake_quantization is None
    for config in configs.values():
        assert (config.learner.dtype, config.rollout.server.dtype) == ("float32", "float32")
        assert config.pipeline.staleness_limit == 0


def test_the_phase_map_compares_arms_that_differ_by_one_thing(plans: Mapping[str, ExperimentPlan]) -> None:
    plan, suite = plans["phase_map"], SUITES["phase_map"]
    clips = {(config.loss.clip_low, config.loss.clip_high) for config in plan.configs.values()}
    assert len(clips) == 2, "with the clip, and out of reach"
    for first, others in suite.against.items():
        for other in others:
            one, two = plan.configs[first], plan.configs[other]
            apart = [
                one.learner.minibatches != two.learner.minibatches,
                one.replay.mode != two.replay.mode,
                one.loss.clip_low != two.loss.clip_low,
            ]
            assert sum(apart) == 1, (first, other)
    for name, config in plan.configs.items():
        updates, mode = name.removeprefix("n").split("_")[:2]
        assert (config.learner.minibatches, config.replay.mode) == (int(updates), mode)
        assert config.rollout.prompts_per_step * config.rollout.group_size // config.learner.minibatches >= 16


def arm(name: str, own: Mapping[int, float], unrounded: float | None = None) -> Arm:
    """Finished runs by seed, whose engine k3 is a hundredth of their success, and one that failed."""
    runs = {}
    for seed, value in own.items():
        rows: list[Row] = [
            {"step": 0, "eval/avg_at_1": 0.4, "eval/accuracy": 0.4},
            {"step": 1, "engine/k3_kl": 9.0},
            {"step": 20, "engine/k3_kl": None},
            {"step": 24, "eval/avg_at_1": value, "eval/accuracy": value + 0.1, "engine/k3_kl": value / 100},
        ]
        runs[seed] = Run(Path(name), {"name": name}, rows, ())
    states = tuple(RunState(run=f"{name}-seed{s}", arm=name, seed=s, state="finished") for s in own)
    failed = RunState(run=f"{name}-seed9", arm=name, seed=9, state="failed", reason="lost")
    after = {} if unrounded is None else {"sglang": [{"eval/avg_at_1": unrounded + seed} for seed in own]}
    return Arm(name, runs, (*states, failed), after)


SUITE = Suite("Success", late=12, against={"none": ()}, beside=(ENGINE_K3,))


def test_figures_pair_seeds_and_count_failures() -> None:
    arms = [arm("none", {0: 0.3, 1: 0.4, 2: 0.5}), arm("TIS", {0: 0.5, 1: 0.6, 2: 0.71, 3: 0.9})]
    row = suite_figures.arm_row(arms[1], SUITE)
    assert (row["finished"], row["failed"], row["sampled_runs"]) == (4, 1, "0.5 0.6 0.71 0.9")
    assert float(row["engine_k3"]) == pytest.approx(0.006775), "of late steps alone"
    first, second = map(suite_figures.difference_row, suite_figures.comparisons(arms, SUITE))
    assert (first["in"], second["in"]) == ("eval/avg_at_1", "eval/accuracy")
    assert (first["difference"], first["pairs"]) == ("TIS - none", 3)
    assert float(first["mean"]) == pytest.approx(0.61 / 3)
    assert "1 of 4 runs of none" in str(first["may_be_said"])
    assert list(suite_figures.comparisons(arms[1:], SUITE)) == [], "the arm to compare with has not run"
    picture = suite_figures.draw(arms, SUITE)
    assert picture.count("<circle") == 7
    assert "TIS (4)" in picture


def test_seeds_of_an_earlier_report_join_those_of_the_folder() -> None:
    old = arm("none", {0: 0.3, 1: 0.4})
    told = [{"run": s.run, "state": s.state, "reason": "", "attempts": 1, "earlier": []} for s in old.states[:2]]
    earlier = {"rows": [suite_figures.arm_row(old, SUITE)], "runs": told}
    waiting = RunState(run="none-seed3", arm="none", seed=3)
    new = arm("none", {1: 0.5, 2: 0.6})
    both = suite_figures.joined(Arm("none", new.runs, (*new.states[:2], waiting)), earlier, SUITE, 24)
    assert suite_figures.values(both, SAMPLED, 12) == {0: 0.3, 1: 0.5, 2: 0.6}, "the folder's own figures count"
    states = [(0, "finished"), (1, "finished"), (2, "finished"), (3, "waiting")]
    assert [(s.seed, s.state) for s in both.states] == states
    assert suite_figures.joined(new, {"rows": [], "runs": []}, SUITE, 24).runs == new.runs
    answered = suite_figures.joined(arm("none", {1: 0.5, 2: 0.6}, unrounded=7), earlier, SUITE, 24)
    assert suite_figures.values(answered, UNROUNDED, 12) == {1: 8, 2: 9}, "the report has no answers of seed 0"
    both_policies = replace(SUITE, compared=(SAMPLED, UNROUNDED))
    earlier["rows"] = [suite_figures.arm_row(arm("none", {0: 0.3, 1: 0.4}, unrounded=20), both_policies)]
    answered = suite_figures.joined(arm("none", {1: 0.5, 2: 0.6}, unrounded=7), earlier, both_policies, 24)
    assert suite_figures.values(answered, UNROUNDED, 12) == {0: 20, 1: 8, 2: 9}, "the folder's own answers count"


@pytest.mark.parametrize("best", [0.35, 0.5, 0.75, 0.99])
def test_labels_of_the_axis_do_not_meet(best: float) -> None:
    picture = suite_figures.draw([arm("none", {0: 0.05}), arm("TIS", {0: best})], SUITE)
    places = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*anchor="middle"[^>]*>0\.\d\d<', picture)]
    assert min(right - left for left, right in itertools.pairwise(places)) >= 40


def test_answers_after_the_run_are_figures_of_their_own() -> None:
    suite = Suite("Success", late=12, against={"none": ()}, compared=(UNROUNDED,))
    arms = [arm("none", {0: 0.3, 2: 0.5}, unrounded=10), arm("int4", {0: 0.1, 1: 0.1, 2: 0.1}, unrounded=20)]
    assert suite_figures.values(arms[0], UNROUNDED, 12) == {0: 10, 2: 12}
    assert suite_figures.values(arm("none", {0: 0.3}), UNROUNDED, 12) == {}, "nobody answered"
    [found] = suite_figures.comparisons(arms, suite)
    assert list(found.difference.differences) == [10, 10]
    assert "no claim is possible with 2 seeds" in found.certainty


def test_a_figure_of_two_metrics_needs_both() -> None:
    high, low = TAIL.metrics
    rows = [{"step": 12, high: 0.1, low: 0.25}, {"step": 24, high: 0.2, low: 0.25}]
    both, one = (Run(Path("a"), {}, own, ()) for own in (rows, [{"step": 24, high: 0.2}]))
    assert suite_figures.values(Arm("a", {0: both, 1: one}, ()), TAIL, 12) == {0: pytest.approx(0.4)}
    assert TAIL.source == f"{high} + {low}"


def test_gains_are_compared_where_a_seed_has_all_four_runs() -> None:
    suite = Suite("Success", 12, {}, (SAMPLED,), crossings=((("n4_R3", "n4_R2"), ("n8_R3", "n8_R2")),))
    four = [arm("n4_R2", {0: 0.4, 1: 0.4, 2: 0.4}), arm("n4_R3", {0: 0.3, 1: 0.3, 2: 0.3})]
    eight = [arm("n8_R2", {0: 0.2, 1: 0.2}), arm("n8_R3", {0: 0.4, 1: 0.41, 2: 0.5})]
    [found] = suite_figures.comparisons([*four, *eight], suite)
    row = suite_figures.difference_row(found)
    assert row["difference"] == "(n8_R3 - n8_R2) - (n4_R3 - n4_R2)"
    assert found.difference.differences == pytest.approx((0.3, 0.31))
    assert list(suite_figures.comparisons([*four, eight[0]], suite)) == []
    assert found.difference.interval is not None
    assert (row["low"], row["high"]) == found.difference.interval


def test_tables_say_how_many_runs_and_what_is_not_shown() -> None:
    arms = [arm("none", {0: 0.3, 1: 0.4, 2: 0.5}), arm("TIS", {0: 0.5, 1: 0.3, 2: 0.5})]
    arms.append(Arm("late", {}, (RunState(run="late-seed0", arm="late", seed=0, state="failed"),)))
    told = suite_figures.arm_table(arms, SUITE).markdown()
    assert "| late | 0 of 1 runs finished, 1 failed | not measured |" in told
    assert "| none | 3 of 4 runs finished, 1 failed | 0.4 [" in told
    [sampled, _greedy] = suite_figures.difference_table(list(suite_figures.comparisons(arms, SUITE))).rows
    assert sampled[0] == "TIS - none"
    assert sampled[-1].startswith("not shown: the interval holds 0, of the finished runs alone")


def test_the_length_of_right_answers_grows_by_its_slope() -> None:
    # All octaves alike have the mean of the lengths; then the longest alone is solved. One evaluation is no slope.
    metrics, longest = RIGHT_LENGTH.metrics, RIGHT_LENGTH.lengths[-1]
    alike, last = dict.fromkeys(metrics, 0.5), dict.fromkeys(metrics, 0.0) | {metrics[-1]: 0.25}
    nothing = dict.fromkeys(metrics, 0.0)
    rows: list[Row] = [{"step": 0, **alike}, {"step": 10, "reward/mean": 1.0}, {"step": 20, **last}]
    unknown: Row = {"step": 40, **alike, metrics[0]: None}
    runs = {0: rows, 1: rows[:2], 2: [*rows, {"step": 40, **nothing}], 3: [*rows, unknown]}
    of_seeds = Arm("a", {seed: Run(Path("a"), {}, rows, ()) for seed, rows in runs.items()}, ())
    slope = (longest - sum(RIGHT_LENGTH.lengths) / len(metrics)) / 20
    assert suite_figures.values(of_seeds, RIGHT_LENGTH, 0) == dict.fromkeys((0, 2, 3), pytest.approx(slope))


def test_figures_of_several_metrics_join_as_well() -> None:
    high, low = TAIL.metrics
    suite = replace(SUITE, compared=(TAIL,))
    state = RunState(run="a-seed0", arm="a", seed=0, state="finished")
    old = Arm("a", {0: Run(Path("a"), {}, [{"step": 24, high: 0.1, low: 0.25}], ())}, (state,))
    kept = {"run": state.run, "state": state.state, "reason": "", "attempts": 1, "earlier": []}
    both = suite_figures.joined(
        Arm("a", {}, ()), {"rows": [suite_figures.arm_row(old, suite)], "runs": [kept]}, suite, 24
    )
    assert suite_figures.values(both, TAIL, 12) == {0: 0.35}


def test_lengths_of_solutions_are_those_of_the_held_out_sums(tmp_path: Path) -> None:
    addends.write(tmp_path)
    for octave, tokens in SOLUTION_TOKENS.items():
        prompts = [json.loads(line)["prompt"] for line in (tmp_path / f"{octave}.jsonl").read_text().splitlines()]
        sums = [addends.Addends(tuple(map(int, re.findall(r"\d+", prompt)))) for prompt in prompts]
        assert fmean(len(problem.solution) + 1 for problem in sums) == tokens
