"""The primary metric: refused before the first run where no run of these settings writes it."""

from __future__ import annotations

import difflib

from moe_trm.config.problems import Problem
from moe_trm.config.schema import EvalConfig, RolloutConfig, TaskConfig
from moe_trm.config.task_rules import evaluation_metrics
from moe_trm.observe.report.charts import SECTIONS, matching
from moe_trm.observe.report.conclusion import MEASURES, Measure


def measure_of(metric: str) -> Measure:
    """The comparison of a metric: an evaluation by its last value, what every step measures by its last steps."""
    drawn = next((measure for measure in MEASURES if measure.metric == metric), None)
    return drawn or Measure(metric, metric, at_end=metric.startswith("eval/"))


def metric_problem(metric: str, evaluation: EvalConfig, task: TaskConfig, rollout: RolloutConfig) -> Problem | None:
    """The reason that `metric` cannot decide between runs of these settings; None where it can.

    Evaluations are known from the settings. All others are those that the report draws.
    """
    if metric.startswith("eval/"):
        if not task.has_evaluation:
            return Problem(
                "primary_metric",
                "these runs evaluate on nothing",
                got=metric,
                expected="held-out prompts",
                fix="set task.eval_prompts" if task.reads_prompts else "set task.eval_size above 0",
            )
        metrics = evaluation_metrics(evaluation, task, rollout)
        return None if metric in metrics else _unknown(metric, metrics)
    patterns = [pattern for section in SECTIONS for chart in section.chart for pattern in chart.metrics]
    if matching(tuple(patterns), [metric]):
        return None
    return _unknown(
        metric, [name for name, _ in patterns if "*" not in name] + evaluation_metrics(evaluation, task, rollout)
    )


def _unknown(metric: str, metrics: list[str]) -> Problem:
    close = difflib.get_close_matches(metric, metrics, n=3)
    return Problem(
        "primary_metric",
        "no run of these settings writes this metric",
        got=metric,
        expected=" or ".join(close) if close else ", ".join(metrics[:6]),
        fix="docs/report.md says where the metrics of a run are",
    )
