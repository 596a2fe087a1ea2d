"""The command line of a benchmark or a drill: `python -m MODULE`, described by the module's docstring."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path


def command_line(file: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for the module at `file`; all of them can write their rows with `--json`."""
    paragraphs = (doc or "").strip().split("\n\n")
    module = ".".join(Path(file).with_suffix("").relative_to(Path(__file__).parents[1]).parts)
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description="\n\n".join(textwrap.fill(paragraph, 100, break_on_hyphens=False) for paragraph in paragraphs),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows here too, with command, date and machine"
    )
    return parser
