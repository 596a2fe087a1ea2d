"""The report says what `metrics.jsonl` says, drawn and written; odd run directories get clear answers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from moe_trm.cli import main
from moe_trm.config.choices import Choice
from moe_trm.errors import RunError
from moe_trm.observe.report.charts import matching
from moe_trm.observe.report.commands import write
from moe_trm.observe.report.draw import MOST_POINTS, thinned
from moe_trm.observe.report.scale import Scale, short, ticks, value_scale
from moe_trm.observe.report.summary import checks
from moe_trm.run_folder.run import CHOICES, read_run
from tests.unit.observe.report.made_run import make_run
from tests.unit.observe.report.page_reader import PageReader


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def page_of(*runs: Path) -> PageReader:
    return PageReader(write(runs).read_text())


def points(rows: list[dict[str, Any]], metric: str) -> list[tuple[int, float | None]]:
    return [(row["step"], row[metric]) for row in rows if metric in row]


def test_the_page_holds_exactly_the_numbers_of_the_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    page, rows = page_of(run), rows_of(run)
    (told,) = page.data["runs"]
    assert told["metrics"].keys() >= {"reward/mean", "engine/k3_kl", "routing/flips/engine/layer_11", "time/wait_s"}
    for name, series in told["metrics"].items():
        assert list(zip(series["steps"], series["values"], strict=True)) == points(rows, name)


def test_the_head_names_corrections_and_loss(tmp_path: Path) -> None:
    correction = {"preset": "decoupled_geo_rs", "rules": [{"name": "mine.py:bounded"}, {"name": "icepop"}]}
    run = make_run(tmp_path / "one", correction=correction, loss={"name": "mine.py:smooth"})
    head = write([run]).read_text().partition("</header>")[0]
    assert "correction decoupled_geo_rs, mine.py:bounded, icepop · loss mine.py:smooth" in head


def test_the_head_says_what_auto_became_and_why(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    assert "auto -&gt;" not in write([run]).read_text()
    choice = Choice("replay.mode", "R3", "samples may be 4 versions old; R2 would lose them")
    (run / CHOICES).write_text(json.dumps([asdict(choice)]))
    head = write([run]).read_text().partition("</header>")[0]
    said = "replay.mode: auto -&gt; R3: samples may be 4 versions old; R2 would lose them"
    assert f"<details><summary>1 setting was chosen by auto</summary><ul><li>{said}</li>" in head
    other = make_run(tmp_path / "other")
    assert f"<li>{said} (one)</li>" in write([run, other]).read_text()
    (other / CHOICES).write_text(json.dumps([asdict(choice)]))
    assert write([run, other]).read_text().count(said) == 1


def test_every_number_in_the_text_is_one_of_the_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    measured = {value for row in rows_of(run) for value in row.values() if isinstance(value, float | int)}
    page = page_of(run)
    assert len(page.values) > 50
    assert set(page.values) <= measured


def test_every_drawn_place_is_a_measured_value(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    rows, drawn = rows_of(run), 0
    for drawing in page_of(run).drawings:
        reach = abs(drawing.x[2] - drawing.x[1]) / abs(drawing.x[4] - drawing.x[3]) * 0.01
        for kind, mark in drawing.marks:
            if kind not in ("polyline", "circle"):
                continue
            known = dict(points(rows, mark["data-metric"]))
            places = mark["points"].split() if kind == "polyline" else [f"{mark['cx']},{mark['cy']}"]
            for place in places:
                x, y = map(float, place.split(","))
                step = round(drawing.step(x))
                assert drawing.step(x) == pytest.approx(step, abs=reach)
                value = known[step]
                assert value is not None
                low, high = sorted((drawing.value(y - 0.006), drawing.value(y + 0.006)))
                assert low <= value <= high, (mark["data-metric"], step)
                drawn += 1
    assert drawn > 200


def test_a_standard_error_is_drawn_as_a_band_of_two(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    measured = [{"probe/native_k3_kl": 1e-3 * (1 + row["step"]), "probe/native_k3_kl_se": 1e-4} for row in rows_of(run)]
    lines = [json.dumps(row | own) + "\n" for row, own in zip(rows_of(run), measured, strict=True)]
    (run / "metrics.jsonl").write_text("".join(lines))
    page = page_of(run)
    drawing = next(d for d in page.drawings if any(m["data-metric"] == "probe/native_k3_kl" for _, m in d.marks))
    [band] = re.findall(r'<polygon class="band f\d+" points="([^"]+)"', (run / "report.html").read_text())
    edges = [(round(drawing.step(float(x))), drawing.value(float(y))) for x, y in (p.split(",") for p in band.split())]
    first = rows_of(run)[0]["step"]
    assert edges[0] == pytest.approx((first, 1e-3 * (1 + first) + 2e-4), rel=0.01)
    assert edges[-1] == pytest.approx((first, 1e-3 * (1 + first) - 2e-4), rel=0.01)
    assert page.data["runs"][0]["metrics"]["probe/native_k3_kl_se"]["values"] == [1e-4] * len(edges[::2])


def test_heat_maps_shade_by_value_and_columns_stack_to_the_sum(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    rows, page = rows_of(run), page_of(run)
    heat = next(d for d in page.drawings if any(m["data-metric"] == "routing/flips/engine/layer_0" for _, m in d.marks))
    cells: dict[str, list[float]] = {}
    for kind, mark in heat.marks:
        assert kind == "cell"
        cells.setdefault(mark["data-metric"], []).append(float(mark["fill-opacity"]))
    top = 0.022
    for name, shades in cells.items():
        values = [value for _, value in points(rows, name)]
        assert shades == [pytest.approx((value or 0.0) / top, abs=6e-4) for value in values]
    # Layers from the first on top to the last, by number.
    assert [name.rpartition("_")[2] for name in cells] == [str(layer) for layer in range(12)]
    stack = next(d for d in page.drawings if any(m["data-metric"] == "time/wait_s" for _, m in d.marks))
    heights: dict[str, list[float]] = {}
    for _, mark in stack.marks:
        heights.setdefault(mark["data-metric"], []).append(float(mark["height"]))
    unit = (stack.y[2] - stack.y[1]) / abs(stack.y[4] - stack.y[3])
    for name, found in heights.items():
        assert [height * unit for height in found] == [
            pytest.approx(value, abs=0.01 * unit) for _, value in points(rows, name)
        ]


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path / "one")).text
    assert "Not drawn: values that were not finite (1); values of 0 or less, on a logarithmic axis (1)." in text


def test_verdicts_with_their_steps_and_text_that_cannot_break_the_page(tmp_path: Path) -> None:
    html = write([make_run(tmp_path / "one")]).read_text()
    page = PageReader(html)
    assert "They <disagree>. replay.mode=R3" in page.text
    assert "<disagree>" not in html
    assert page.text.count("All is well.") == 3  # now, at step 1 and from step 7 on
    assert "rejected: nan_logprob" in page.text


def test_proofs_that_fail_are_marked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    rows = rows_of(run)
    rows[3]["replay/applied_fraction"], rows[5]["ledger/trained"] = 0.5, 0.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = write([run]).read_text()
    assert '<tr class="bad"><td class="mark">✗</td><th scope="row">Replayed token-layers' in html
    assert "First step whose sample ledger does not balance" in html


def test_sums_in_another_order_are_worth_a_look_and_break_no_promise(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    rows = rows_of(run)
    for row in rows:
        row.pop("update/first_nonzero_fraction", None)
        row["update/first_reordered_fraction"] = 0.25
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    states = {check.what: (check.value, check.state) for check in checks(read_run(run))}
    assert states["Tokens whose first update pass differs in the order of a sum on the GPU"] == (0.25, "note")
    assert states["Tokens that the first update pass did not reproduce bit for bit"] == (None, "none")
    assert not any("order of a sum" in check.what for check in checks(read_run(make_run(tmp_path / "two"))))


def test_anti_patterns_are_those_of_settings_and_of_metrics(tmp_path: Path) -> None:
    assert "Anti-patterns" not in page_of(make_run(tmp_path / "calm")).text
    run = make_run(tmp_path / "one", pipeline={"mode": "async", "max_staleness": 4})
    rows = rows_of(run)
    for step, row in enumerate(rows):
        row["engine/probs_diff_max"] = 0.95 if step == 5 else 0.2 if step else None
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = page_of(run).text
    for told in ("Anti-patterns", "far ahead, uncorrected", "maximum averaged away", "moe-trm doctor"):
        assert told in text
    assert "replay at one step" not in text
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | {"of_another_version": 1}))
    assert "Not looked for: this version" in page_of(run).text


def test_two_runs_side_by_side_differing_settings_first(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", replay={"mode": "R3"})
    other = make_run(tmp_path / "other", done=5, replay={"mode": "R2"}, optimizer={"lr": 3e-5})
    html = write([one, other]).read_text()
    page = PageReader(html)
    settings = html[html.index("Settings that differ") : html.index("Key figures")]
    assert "replay.mode" in settings
    assert "optimizer.lr" in settings
    assert "train.steps" not in settings
    assert [run["name"] for run in page.data["runs"]] == ["one", "other"]
    for told, run in zip(page.data["runs"], (one, other), strict=True):
        for name, series in told["metrics"].items():
            assert list(zip(series["steps"], series["values"], strict=True)) == points(rows_of(run), name)
    assert (one / "report-other.html").is_file()


def test_a_chart_that_never_changes_is_a_line(tmp_path: Path) -> None:
    """The proof was 1.0 at every step; the reward moved, and of two runs with two values both are drawn."""
    run = make_run(tmp_path / "one")
    html = write([run]).read_text()
    titles = [part.partition("<")[0] for part in html.split("<figcaption><h3>")[1:]]
    assert "Reward and evaluation" in titles
    assert "Replay proof" not in titles
    assert "Replay proof" in html.partition('class="still"')[2]
    assert "replay/applied_fraction" in page_of(run).data["runs"][0]["metrics"]
    other = make_run(tmp_path / "other")
    rows = [{**row, **({"replay/applied_fraction": 0.5} if row["step"] else {})} for row in rows_of(other)]
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "<figcaption><h3>Replay proof" in write([run, other]).read_text()


def test_labels_of_heat_maps_are_whole(tmp_path: Path) -> None:
    """The longest label begins inside the drawing."""
    run = make_run(tmp_path / "one")
    rows = [{**row, "acceptance/length_16385_up": 0.01 * row["step"]} for row in rows_of(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = write([run]).read_text()
    (place,) = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end">16385 and more</text>', html)
    assert float(place) - 6 * len("16385 and more") > 0


def test_a_run_still_being_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", steps=8, done=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    read = read_run(run)
    assert (read.last_step, read.complete, read.notes) == (3, False, ())
    assert "step 3 of 8" in page_of(run).text
    assert "stopped early or still running" in page_of(run).text


def test_damaged_lines_are_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "one")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[2], lines[4], lines[6] = lines[2][:40], "[1, 2]", '{"step": "six"}'
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert [row["step"] for row in read_run(run).rows] == [0, 1, 3, 5, 7, 8]
    assert "Damaged lines of metrics.jsonl were left out: 3, 5, 7 (3 in all)." in page_of(run).text
    assert "3, 5, 7" in capsys.readouterr().err


def test_a_missing_or_unreadable_configuration_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    (run / "config.json").write_text("{")
    assert "config.json cannot be read" in page_of(run).text
    (run / "config.json").unlink()
    assert "config.json is missing" in page_of(run).text


def test_folders_without_a_run_get_clear_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "runs" / "one")
    for folder, said in [
        (tmp_path / "nowhere", "no such run directory"),
        (run / "config.json", "a file"),
        (tmp_path / "runs", "moe-trm report"),
        (tmp_path, "neither config.json nor metrics.jsonl"),
    ]:
        with pytest.raises(RunError, match=said):
            read_run(folder)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="not finished a step yet"):
        read_run(run)
    (run / "metrics.jsonl").write_text("not json\n")
    with pytest.raises(RunError, match=r"no line of metrics\.jsonl can be read"):
        read_run(run)
    (run / "metrics.jsonl").unlink()
    assert main(["report", str(run)]) == 2
    assert "not finished a step yet" in capsys.readouterr().err


def test_the_command_writes_where_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "one")
    assert main(["report", str(run)]) == 0
    assert Path(capsys.readouterr().out.strip()) == run / "report.html"
    assert main(["report", str(run), "--out", str(tmp_path / "elsewhere.html")]) == 0
    assert (tmp_path / "elsewhere.html").is_file()


def test_a_run_of_one_step_and_a_moved_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", steps=1)
    moved = tmp_path / "moved" / "here"
    shutil.copytree(run, moved)
    assert "step 1 of 1" in page_of(moved).text


def test_thinning_keeps_first_last_and_extremes() -> None:
    x = Scale(0, 9999, 0, 300)
    series = [(step, float(step % 97)) for step in range(10000)]
    series[1234], series[4321] = (1234, 1e6), (4321, -1e6)
    kept = thinned(series, x)
    assert len(kept) <= MOST_POINTS + 4
    assert kept[0] == series[0]
    assert kept[-1] == series[-1]
    assert {series[1234], series[4321]} <= set(kept)
    assert set(kept) <= set(series)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [1e-9, 2e-9], [-3.0, 4.0], [1e12], [1e-5, 3e-5], []])
@pytest.mark.parametrize("log", [False, True])
def test_scales_have_ticks_and_hold_their_values(values: list[float], log: bool) -> None:
    scale = value_scale(values, 100, 0, log=log)
    for value in values:
        if value > 0 or not log:
            assert 0 <= scale(value) <= 100
    assert 1 <= len(ticks(scale)) <= 8
    assert all(scale.low <= tick <= scale.high for tick in ticks(scale))


def test_short_numbers() -> None:
    assert [short(value) for value in (0.0, 1.0, 0.09375, 2.919e-5, 2770.44, 5120.0, 1e-4, -0.25, 123456.0)] == [
        "0", "1", "0.0938", "2.92e-5", "2770", "5120", "1e-4", "-0.25", "1.23e5",
    ]  # fmt: skip


def test_shares_by_rule_and_length_are_named_by_both() -> None:
    names = [f"correction/trm_max@total/rejected_length_{octave}" for octave in ("8_15", "16_31", "524288_up")]
    labels = matching((("correction/*/rejected_length_*", ""),), reversed(names))
    assert labels == list(
        zip(names, ("trm_max@total, 8 to 15", "trm_max@total, 16 to 31", "trm_max@total, 524288 and more"), strict=True)
    )
