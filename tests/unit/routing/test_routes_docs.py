"""The page about routes names the layouts that are tested, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.test_learner_layouts import LAYOUTS, PRODUCTS

PAGE = Path(__file__).parents[3] / "docs" / "routes.md"


def test_the_table_of_layouts_is_the_tested_matrix() -> None:
    rows = re.findall(r"^\| (\S+) \| (\d) (?:\| equal ){5}\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [*((name, "2") for name in LAYOUTS), *((name, "4") for name in PRODUCTS)]
