"""The library's notebook: its cells run in order in a fresh process, and print what stands in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.notebook import ROOT, code_cells, run, stored

NOTEBOOK = ROOT / "examples" / "library" / "library.ipynb"


@pytest.mark.long
def test_it_prints_what_it_says() -> None:
    said = stored(NOTEBOOK)
    assert run(NOTEBOOK) == said, f"run `python -m tests.integration.notebook {NOTEBOOK.relative_to(ROOT)}`"
    text = "".join(said)
    for words in (
        "of 104 token-layers used the recorded experts",
        "refused: FlipBoundError",
        "refused: digest",
        "kept",
    ):
        assert words in text
    assert sum(1 for one in said if one) >= 5


def test_it_is_a_notebook_of_the_current_format() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    numbers = [cell["execution_count"] for cell in code_cells(notebook)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_cell_that_fails_is_told(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": ["x = 1\n"]}, {"cell_type": "code", "source": ["print(x / 0)\n"]}]
    (tmp_path / "wrong.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    with pytest.raises(RuntimeError, match="cell 1"):
        run(tmp_path / "wrong.ipynb")
