"""The page of methods says what the code says."""

from __future__ import annotations

import re

from benchmarks import length_bias, methods_page
from moe_trm import corrections, losses
from moe_trm.batch.outcome import OUTCOME


def test_the_page_is_up_to_date() -> None:
    said = methods_page.PAGE.read_text(encoding="utf-8")
    assert said == methods_page.page(), "run `python -m benchmarks.methods_page`"


def test_every_method_has_an_equation_or_rule_and_a_source() -> None:
    for name in corrections.names():
        assert "Source: methods.md" in str(corrections.get(name).__doc__), name
    for name in losses.names():
        assert re.search(r"Source: methods\.md \d", str(losses.get(name).__doc__)), name
    page = methods_page.page()
    for name in (*corrections.names(), *losses.names(), *corrections.presets, *OUTCOME):
        assert f"`{name}`" in page
    assert "methods.md " not in page.replace("docs/methods.md", "")


def test_maxima_reject_long_rows_and_means_short_ones() -> None:
    found = {one.rule: one for one in length_bias.slopes()}
    for name in ("trm_max", "token_veto", "seq_max_k3", "seq_sum_k3"):
        assert found[name].low > 1, name
    for name in ("trm_avg", "ser", "ln_trm", "seq_mean_k3", "geometric_mask", "opsm"):
        assert found[name].high < -1, name
    for one in found.values():
        assert one.low < one.slope < one.high
