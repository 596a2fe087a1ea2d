"""`moe-trm report RUN_DIR [RUN_DIR2 ...]`: the HTML report of a run, finished or not, or of several side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_trm.observe.report.conclusion import sentences
from moe_trm.observe.report.page import render
from moe_trm.run_folder.run import read_run
from moe_trm.runtime.private import write_private

MOST_NAMED = 4
"""Runs that a file name lists."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm report`."""
    parser.add_argument("run_dir", help="run directory, usually runs/NAME")
    parser.add_argument(
        "others", nargs="*", metavar="run_dir", help="further runs: what sets them apart and how they differ come first"
    )
    parser.add_argument(
        "--out", help="file to write (default: RUN_DIR/report.html; of several RUN_DIR/report-NAME2.html)"
    )


def run(args: argparse.Namespace) -> int:
    folders = [Path(folder) for folder in (args.run_dir, *args.others)]
    if len(folders) > 1:
        print("\n".join(sentences([read_run(folder) for folder in folders])))
    print(write(folders, Path(args.out) if args.out else None))
    return 0


def write(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report and return its place; what could not be read is told on stderr. Raises `RunError`."""
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        for note in run.notes:
            print(f"warning: {run.folder}: {note}", file=sys.stderr)
    name = "-".join(["report", *(folder.resolve().name for folder in folders[1:])]) + ".html"
    if len(folders) > MOST_NAMED:
        name = f"report-{len(folders)}-runs.html"
    path = out or folders[0] / name
    write_private(path, render(runs).encode())
    return path
