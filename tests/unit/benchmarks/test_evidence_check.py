"""The pages state what the result files have: claims are computed again, numbers without a claim are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.evidence import check, measures, suite_measures
from benchmarks.evidence.alarm import alarms, at_risk, share_interval
from benchmarks.evidence.check import Claims, near, parsed, read

GAIN = "{gain router_noise R3 none}"
"""0.2650 [0.1745, 0.3555]."""


@pytest.mark.parametrize("claims", list(check.all_claims()), ids=lambda claims: claims.page)
def test_every_figure_of_a_page_is_in_a_result_file(claims: Claims) -> None:
    reading = read((measures.REPOSITORY / claims.page).read_text(encoding="utf-8"), claims)
    assert not reading.problems, "\n".join(reading.problems)


def claims_of(*measured: str, settings: tuple[str, ...] = ()) -> Claims:
    return Claims("page.md", measured, settings)


def test_a_right_figure_is_right_across_lines_and_as_far_as_it_is_printed() -> None:
    for text in (
        "R3 ends 0.265\n[0.174, 0.355] above",
        "R3 ends 0.3 [0.2, 0.4] above",
        "R3 ends +0.26 [0.17, 0.36] above",
    ):
        assert read(text, claims_of(f"ends {GAIN} above")).problems == ()


@pytest.mark.parametrize("figure", ["0.28 [0.17, 0.36]", "0.26 [0.19, 0.36]", "-0.26 [0.17, 0.36]"])
def test_a_wrong_figure_is_reported_and_corrected(figure: str) -> None:
    reading = read(f"R3 ends {figure} above", claims_of(f"ends {GAIN} above"))
    assert reading.problems[0].startswith(f"stated: ends {figure} above")
    assert reading.problems[0].endswith("computed: ends 0.26 [0.17, 0.36] above")
    assert reading.corrected == "R3 ends 0.26 [0.17, 0.36] above"


def test_a_missing_statement_is_reported() -> None:
    assert read("R3 ends.", claims_of(f"ends {GAIN} above")).problems == (f"nothing like: ends {GAIN} above",)


@pytest.mark.parametrize(
    "text", ["It is 0.31.", "It is 2e-5.", "It is 12%.", "It was 3 of 5.", "It takes 4 times as long.", "| 0.31 |"]
)
def test_a_measurement_without_a_claim_is_noticed(text: str) -> None:
    assert any("no claim has" in problem for problem in read(text, claims_of()).problems)


@pytest.mark.parametrize(
    "text", ["`lr=0.31`", "[a](b-0.31.md)", "arXiv 2510.11370", "on 2026-11-23", "## A 0.31", "three seeds, 24 steps"]
)
def test_code_links_papers_and_dates_are_no_measurements(text: str) -> None:
    assert read(text, claims_of()).problems == ()


def test_settings_are_named_one_by_one() -> None:
    text = "A rate of 1e-4 and a share of 0.5."
    assert len(read(text, claims_of()).problems) == 2
    assert len(read(text, claims_of(settings=("a rate of 1e-4",))).problems) == 3, "letters count"
    assert read(text, claims_of(settings=("A rate of 1e-4", "share of 0.5"))).problems == ()


@pytest.mark.parametrize(
    ("text", "number", "step"),
    [
        ("0.27", 0.27, 0.01),
        ("1,450", 1450, 10),
        ("170", 170, 10),
        ("7.1e-5", 7.1e-5, 1e-6),
        ("12%", 0.12, 0.01),
        ("0", 0, 1),
    ],
)
def test_a_printed_number_has_a_step(text: str, number: float, step: float) -> None:
    assert parsed(text) == pytest.approx((number, step))


def test_counts_are_exact_and_other_numbers_are_rounded() -> None:
    assert near("170", 172.4)
    assert not near("170", 176.0)
    assert not near("170", 171)


def test_p_of_students_paired_t() -> None:
    """t = 1 with 1 degree of freedom has p = 1/2; with 2, p = 1 - 1 / sqrt(3). Others are of tables."""
    assert suite_measures.p_of([0.0, 2.0]) == pytest.approx(0.5)
    assert suite_measures.p_of([1.0, 2.0, 4.0]) == pytest.approx(0.118083, abs=1e-6)
    assert suite_measures.p_of([1.0, 2.0, 4.0, 3.0]) == pytest.approx(0.030466, abs=1e-6)
    assert suite_measures.p_of([1.0, 2.0, 4.0, 3.0, 9.0, -2.0]) == pytest.approx(0.116118, abs=1e-5)


def test_holm_multiplies_by_what_is_left() -> None:
    """0.01 x 3, 0.02 x 2, and 0.03 x 1, which may not fall below the one before it."""
    adjusted = suite_measures.adjusted({("a", "x"): 0.03, ("b", "x"): 0.01, ("c", "x"): 0.02})
    assert adjusted == {
        ("b", "x"): pytest.approx(0.03),
        ("c", "x"): pytest.approx(0.04),
        ("a", "x"): pytest.approx(0.04),
    }


def test_a_shared_seed_explains_what_all_arms_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms 0, 1, 2 and 1, 2, 3 differ by seed alone; in 0, 1, 0 and 1, 0, 1 no seed is shared."""
    shared = [{"arm": "a", "sampled_runs": "0 1 2"}, {"arm": "b", "sampled_runs": "1 2 3"}]
    alone = [{"arm": "a", "sampled_runs": "0 1 0"}, {"arm": "b", "sampled_runs": "1 0 1"}]
    tables = {"shared": shared, "alone": alone}
    monkeypatch.setattr(suite_measures, "rows", lambda file: tables[file])
    assert suite_measures.seed_share("shared") == pytest.approx(1.0)
    assert suite_measures.seed_share("alone") == 0.0


def test_the_interval_of_a_share_is_exact() -> None:
    """None of 10: 1 - 0.025^(1/10). All of 10: 0.025^(1/10)."""
    assert share_interval(0, 10) == pytest.approx((0.0, 1 - 0.025**0.1), abs=1e-9)
    assert share_interval(10, 10) == pytest.approx((0.025**0.1, 1.0), abs=1e-9)
    low, high = share_interval(10, 32)
    assert (low, high) == pytest.approx((0.161, 0.500), abs=1e-3)


def test_runs_that_cannot_alarm_are_not_at_risk() -> None:
    assert at_risk("headline/none-seed3")
    assert not any(map(at_risk, ("R3_TIS-seed0", "dose_0-seed1", "no_noise-seed2", "published_none-seed0")))
    rows: list[dict[str, str | int | float]] = [
        {"run": "none-seed0", "reward_turned_at": 60, "warned_at": 20},
        {"run": "none-seed1", "reward_turned_at": 60, "warned_at": 61},
        {"run": "none-seed2", "reward_turned_at": "never", "warned_at": 30},
        {"run": "none-seed3", "reward_turned_at": "never", "warned_at": "never"},
    ]
    row = alarms("at risk", rows)
    assert (row["warned"], row["falsely"], row["false"]) == ("1 of 2", "1 of 2", 0.5)


def test_the_command_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text("R3 ends 0.99 [0.99, 0.99] above it, and 0.5 more.\n")
    folder = tmp_path / "claims"
    folder.mkdir()
    (folder / "page.toml").write_text(
        f'page = "page.md"\nmeasured = """\nends {GAIN} above\n"""\nsettings = """\n0.5 more\n"""\n'
    )
    monkeypatch.setattr(check, "REPOSITORY", tmp_path)
    monkeypatch.setattr(check, "CLAIMS", folder)
    assert check.main([]) == 1
    assert "computed: ends 0.26 [0.17, 0.36] above" in capsys.readouterr().out
    assert check.main(["--write"]) == 0
    assert (tmp_path / "page.md").read_text() == "R3 ends 0.26 [0.17, 0.36] above it, and 0.5 more.\n"
