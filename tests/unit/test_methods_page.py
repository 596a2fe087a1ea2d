"""The page of methods says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import moe_trm
from benchmarks import length_bias
from docs.make import methods_page
from moe_trm import corrections, losses
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.methods.built_in import FILE


def test_the_page_is_up_to_date() -> None:
    said = methods_page.PAGE.read_text(encoding="utf-8")
    assert said == methods_page.page(), "run `python -m docs.make.methods_page`"


def test_the_table_that_needs_no_torch_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == methods_page.table(), "run `python -m docs.make.methods_page`"


def test_every_method_says_when_it_is_the_right_one_and_where_it_comes_from() -> None:
    page = methods_page.page()
    for name in (*corrections.names(), *losses.names()):
        registered = corrections.get(name) if name in corrections.names() else losses.get(name)
        assert re.search(r"Source: \w", str(registered.__doc__)), name
        entry = page.partition(f"### `{name}`\n")[2].partition("\n### ")[0]
        assert "**When:** " in entry, name
        assert "**Cost:** " in entry, name
    for name in (*corrections.presets, *ADVANTAGES):
        assert f"`{name}`" in page


def test_no_source_is_a_section_that_a_reader_cannot_open() -> None:
    for path in Path(moe_trm.__file__).parent.rglob("*.py"):
        assert not re.search(r"(?<!docs/)methods\.md", path.read_text()), path


def test_maxima_reject_long_rows_and_means_short_ones() -> None:
    found = {one.rule: one for one in length_bias.slopes()}
    for name in ("trm_max", "token_veto", "seq_max_k3", "seq_sum_k3"):
        assert found[name].low > 1, name
    for name in ("trm_avg", "ser", "ln_trm", "seq_mean_k3", "geometric_mask", "opsm"):
        assert found[name].high < -1, name
    for one in found.values():
        assert one.low < one.slope < one.high
