"""The verdict reaches the metrics and, when it changes, the progress lines."""

from __future__ import annotations

import io

from moe_trm.observe.judge import Judge
from moe_trm.observe.lines import ProgressLines

CALM = {"engine/k3_kl": 1e-4, "engine/probs_pearson": 1.0, "engine/ppl_ratio": 1.0, "total/k3_kl": 1e-4}


def test_the_verdict_names_the_setting_that_acts() -> None:
    judge = Judge()
    assert judge.say(CALM).keys() == {"verdict", "verdict/case"}
    apart = judge.say({**CALM, "engine/k3_kl": 0.2})
    assert "disagree" in apart["verdict"]
    assert apart["verdict/config"] == "learner.dtype=float16 rollout.server.dtype=float16"


def test_a_quantised_rollout_is_not_told_to_align() -> None:
    said = Judge("fp8").say({**CALM, "engine/k3_kl": 0.2})
    assert "rounded (fp8), so it is a policy of its own (k3 0.2 from" in said["verdict"]
    assert "align" not in said["verdict"]
    assert "verdict/config" not in said


def test_rejecting_less_while_the_gap_grows_is_an_alarm() -> None:
    judge = Judge()
    said = {}
    for step in range(20):
        said = judge.say({**CALM, "total/k3_kl": 0.001 * step, "correction/kept_fraction": 0.5 + 0.01 * step})
    assert "no longer sees" in said["verdict"]


def test_progress_lines_say_a_new_verdict_once() -> None:
    stream, judge = io.StringIO(), Judge()
    lines = ProgressLines(4, stream)
    for step, k3 in enumerate((1e-4, 0.2, 0.2, *[1e-4] * 11), start=1):
        metrics = {**CALM, "engine/k3_kl": k3}
        lines.write(step, {**metrics, **judge.say(metrics)})
    told = [line for line in stream.getvalue().splitlines() if line.startswith(" ") and "engine_k3:" not in line]
    assert len(told) == 3
    assert told[1].endswith("Try learner.dtype=float16 rollout.server.dtype=float16.")
