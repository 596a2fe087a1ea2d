"""Write docs/papers.md from the tables of `docs/make/papers/`: `python -m docs.make.papers_page`."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from docs.make.paper_table import BASE, REPOSITORY, Method, Paper, Part, read, rows

PAGE = Path(__file__).parents[1] / "papers.md"

INTRO = """# Papers, and what runs them

This page goes from a paper to the settings that run its methods here, and to our own figure where there is one.

`python -m docs.make.papers_page` writes it from the tables in `docs/make/papers/`. A test holds the page to the
tables, and the tables to the code: settings load, figures stand where the links lead, and every method that can be
chosen by name is in a row. The slow tests train two steps with each line of settings.

A line of settings stands for

```sh
moe-trm train {base} SETTINGS
```

`{base}` is the quickstart without corrections; `make quickstart` makes its model. A line that begins with
another file stands for that file instead. Settings are examples. Thresholds that no paper gives are chosen by
`target_reject_rate`, which measures first. [methods.md](methods.md) has the equations, and notes where a form is ours.

- **Claims** are made by the papers, in our words. We have not tested them on large models.
- **Figures** are ours, from tiny models on two cores. Where there is none, we have measured nothing.
- **Not here** gives the reason, and what there is instead.

Of {methods} methods of {papers} papers, {run} have settings that run them, some of them in part: the row names these.
"""


def page() -> str:
    """The whole page."""
    table = rows()
    counts = {
        "methods": len(table),
        "papers": len({paper.title for paper, _ in table}),
        "run": sum(method.run is not None for _, method in table),
    }
    return "\n".join([INTRO.format(base=BASE, **counts), *map(_part, read())])


def _part(part: Part) -> str:
    lines = [f"## {part.title}\n", f"{part.about}\n", "| method | claim | here | our figure |", "|---|---|---|---|"]
    lines += [_row(paper, method) for paper in part.paper for method in paper.method]
    return "\n".join([*lines, ""])


def _row(paper: Paper, method: Method) -> str:
    source = f"[{paper.title}]({paper.address})"
    name = source if method.name == paper.title else f"{method.name}, {source}"
    return f"| {name} | {method.claim} | {_here(method)} | {_figure(method)} |"


def command(method: Method) -> str:
    """The settings of a row as a shell takes them, after another file than the usual one where it needs that."""
    words = list(method.run or ())
    return shlex.join(words if method.base == BASE and words else [method.base, *words])


def _here(method: Method) -> str:
    if method.run is None:
        return f"**Not here.** {method.reason}"
    return f"`{command(method)}` {method.note}".rstrip()


def _figure(method: Method) -> str:
    if not method.figure:
        return ""
    path, _, anchor = method.at.partition("#")
    link = os.path.relpath(REPOSITORY / path, PAGE.parent)
    return f"[{method.figure}]({link}#{anchor})"


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m docs.make.papers_page", description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
