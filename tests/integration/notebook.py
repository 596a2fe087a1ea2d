"""Notebooks without Jupyter: `python -m tests.integration.notebook PATH` runs one and writes what its cells print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUNNER = """
import contextlib, io, json, sys
names, printed = {"__name__": "__main__"}, []
for number, code in enumerate(json.loads(sys.stdin.read())):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, f"cell {number}", "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""
"""The code cells in one namespace, in order."""


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path: Path) -> list[str]:
    """The output of each code cell, in a process of its own. Raises `RuntimeError` with the traceback of a cell."""
    cells = ["".join(cell["source"]) for cell in code_cells(json.loads(path.read_text(encoding="utf-8")))]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    printed: list[str] = json.loads(done.stdout.splitlines()[-1])
    return printed


def stored(path: Path) -> list[str]:
    """The output of its code cells that the notebook has stored."""
    outputs = [cell["outputs"] for cell in code_cells(json.loads(path.read_text(encoding="utf-8")))]
    return ["".join(line for output in cell for line in output["text"]) for cell in outputs]


def write(path: Path) -> None:
    """Run the notebook and put what its cells print into it."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run(path), strict=True), 1):
        cell["execution_count"] = number
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["outputs"] = [stream] if text else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
