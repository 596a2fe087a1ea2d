"""A run that replays nothing never says that its replay was proved."""

from __future__ import annotations

import io

from moe_trm.loop import replay_metrics
from moe_trm.observe.lines import ProgressLines
from moe_trm.step.probe.run import _replayed
from routing.record.sources import ReplayReport


def line(report: ReplayReport) -> str:
    stream = io.StringIO()
    ProgressLines(3, stream).write(1, {"reward/mean": 0.5, **replay_metrics(report)})
    return stream.getvalue()


def test_nothing_replayed_is_no_share_at_all() -> None:
    assert ReplayReport().applied_fraction is None
    assert ReplayReport().local_flip_rate is None
    assert replay_metrics(ReplayReport()) == {"replay/token_layers": 0.0, "replay/native_fraction": 0.0}
    assert "replayed –" in line(ReplayReport())
    assert "%" not in line(ReplayReport())


def test_all_replayed_is_told() -> None:
    report = ReplayReport(replayed=40, matched=40, local_flips=1, local_flips_by_layer={2: 0.025})
    assert replay_metrics(report)["replay/applied_fraction"] == 1.0
    assert replay_metrics(report)["routing/local_flip_rate/layer_2"] == 0.025
    assert "replayed 100%" in line(report)


def test_samples_whose_router_moved_are_counted_where_there_are_any() -> None:
    report = ReplayReport(replayed=40, matched=40, local_flips=1, local_flips_by_layer={2: 0.025})
    assert "routing/moved_samples" not in replay_metrics(report)
    moved = report + ReplayReport(replayed=40, matched=40, local_flips=20, local_flips_by_layer={2: 0.5}, moved=3)
    assert replay_metrics(moved)["routing/moved_samples"] == 3.0


def test_the_probe_has_figures_of_its_own_and_its_moved_samples_are_not_lost() -> None:
    report = ReplayReport(replayed=40, matched=40, local_flips=20, local_flips_by_layer={2: 0.5}, moved=3)
    assert _replayed(report) == {
        "probe/applied_fraction": 1.0,
        "probe/local_flip_rate": 0.5,
        "probe/moved_samples": 3.0,
    }
    assert _replayed(ReplayReport()) == {}


def test_a_label_is_explained_once_above_the_first_line_that_has_it() -> None:
    stream = io.StringIO()
    lines = ProgressLines(3, stream)
    lines.write(1, {"reward/mean": 0.5, "staleness/k3_kl": 1e-4, "correction/kept_fraction": 0.9})
    lines.write(2, {"reward/mean": 0.5, "staleness/k3_kl": 1e-4, "loss/pg_clipfrac": 0.1})
    told = [line.split()[0] for line in stream.getvalue().splitlines()]
    assert told == ["stale_k3:", "kept:", "step", "clip:", "step"]
