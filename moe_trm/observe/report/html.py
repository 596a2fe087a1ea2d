"""Frame of every page: one HTML document with its style, script and data inside. Nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

import orjson

from moe_trm.observe.report.scale import short

_WITH_EXPONENT = re.compile(r"(?<![\w.])\d[\d.]*e-\d+")


def document(title: str, body: str, data: object) -> str:
    """A complete page; `data` is the JSON that the script reads and that a test compares with the metrics.

    A browser runs this script and no other, whatever a text in the page manages to say.
    """
    script = f"\n{_resource('page.js')}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; img-src data:\">\n"
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_resource('page.css')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n"
        '<div id="tip" role="status" hidden></div>\n'
        f'<script type="application/json" id="data">{_embedded(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def text(words: str) -> str:
    """Words for a page, of which no number breaks at the sign of its exponent."""
    return _WITH_EXPONENT.sub(r'<span class="number">\g<0></span>', escape(words))


def number(value: float | None) -> str:
    """A number for the eye, with the exact one as the element's value."""
    if value is None:
        return "not finite"
    return f'<data value="{value!r}" title="{value!r}">{short(value)}</data>'


def section(title: str, body: str, run_name: str = "") -> str:
    """A section of the page; `run_name` is the name of its run, where there are several."""
    return f"<section><h2>{escape(f'{title}: {run_name}' if run_name else title)}</h2>{body}</section>"


def table(head: Sequence[str], rows: Iterable[str]) -> str:
    """A table with plain words in its head, which scrolls by itself where it is too wide."""
    cells = "".join(f"<th>{escape(words)}</th>" for words in head)
    first = f"<tr>{cells}</tr>" if head else ""
    return f'<div class="wide"><table class="rows">{first}{"".join(rows)}</table></div>'


def _embedded(data: object) -> str:
    """JSON that no text in it can break out of."""
    return orjson.dumps(data).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _resource(name: str) -> str:
    return files("moe_trm.observe.report").joinpath(name).read_text(encoding="utf-8")
