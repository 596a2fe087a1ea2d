"""The code of the library's page, from top to bottom in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


def test_the_code_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert len(blocks) >= 3
    assert names["replayed"].report.matched == names["replayed"].report.replayed == (3 + 5) * 2
    assert names["replayed"].report.local_flips == 0
    assert names["first"].report.matched == (1 + 3) * 2
    assert names["got"].keep.sum() == 8
    assert names["model"].get_input_embeddings().weight.grad.abs().sum() > 0
    assert "16 of 16 token-layers" in capsys.readouterr().out
