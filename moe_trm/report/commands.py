"""`moe-trm report RUN_DIR [RUN_DIR2]`: the HTML report of a run, finished or not, or of two side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_trm.report.page import render
from moe_trm.report.run import read_run


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm report`."""
    parser.add_argument("run_dir", help="run directory, usually runs/NAME")
    parser.add_argument("other", nargs="?", help="a second run to put beside it: differing settings come first")
    parser.add_argument(
        "--out", help="file to write (default: RUN_DIR/report.html; of two runs RUN_DIR/report-NAME2.html)"
    )


def run(args: argparse.Namespace) -> int:
    folders = [Path(args.run_dir), *([Path(args.other)] if args.other else [])]
    print(write(folders, Path(args.out) if args.out else None))
    return 0


def write(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report and return its place; what could not be read is told on stderr. Raises `RunError`."""
    runs = [read_run(folder) for folder in folders]
    for each in runs:
        for note in each.notes:
            print(f"warning: {each.folder}: {note}", file=sys.stderr)
    name = "report.html" if len(runs) == 1 else f"report-{folders[1].resolve().name}.html"
    path = out or folders[0] / name
    path.write_text(render(runs), encoding="utf-8")
    return path
