"""Every measurement that the pages state, computed again from the result files.

`python -m benchmarks.evidence.check [--write]`. `benchmarks/evidence/claims/*.toml` list the statements of each page:
fragments in which `{measure words ...}` stands for a figure (`measures.py`). The page must have the fragment with that
figure, rounded as it is printed. Anything else in the page that looks like a measurement (a number with decimals or an
exponent, a percentage, an interval, `N of M`, `N times`) must be among the file's settings: literal fragments whose
numbers were chosen, or come from a paper. `--write` puts the computed figures in the place of wrong ones, at the
precision that is printed there. The status is 1 where something is wrong.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.evidence import suite_measures, task_measures
from benchmarks.evidence.measures import MEASURES, REPOSITORY, Value
from benchmarks.options import command_line

REGISTERED = (suite_measures, task_measures)
"""Modules that register measures."""
CLAIMS = Path(__file__).parent / "claims"
SLOT = re.compile(r"\{([^{}]+)\}")
PRINTED = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?%?"
MEASUREMENT = re.compile(
    r"(?<![\w.])[-+]?(?:\d[\d,]*\.\d+(?:e-?\d+)?%?|\d+e-?\d+|\d[\d,]*%|\d[\d,]* of (?:the )?\d[\d,]*|\d[\d,]* times)"
)
NOT_TEXT = re.compile(
    r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>|arXiv\s+\d+\.\d+|\d{4}-\d{2}-\d{2}|^#.*?$", re.DOTALL | re.MULTILINE
)
"""Code, targets of links, tags, papers, dates and headings have no measurements."""


@dataclass(frozen=True)
class Claims:
    """The statements of a page: fragments with figures, and fragments whose numbers are settings."""

    page: str
    measured: tuple[str, ...]
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """A page read against its claims: wrong or missing statements, spans of the right ones, and the corrected text."""

    problems: tuple[str, ...]
    covered: tuple[tuple[int, int], ...]
    corrected: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--write", action="store_true", help="correct the pages")
    args = parser.parse_args(argv)
    num_figures, wrong = 0, 0
    for claims in all_claims():
        path = REPOSITORY / claims.page
        text = path.read_text(encoding="utf-8")
        reading = read(text, claims)
        if args.write and reading.corrected != text:
            path.write_text(reading.corrected, encoding="utf-8")
            reading = read(reading.corrected, claims)
        num_figures += sum(len(SLOT.findall(fragment)) for fragment in claims.measured)
        for problem in reading.problems:
            print(f"{claims.page}: {problem}")
        wrong += len(reading.problems)
    print(f"{num_figures} figures were computed again; {wrong} statements are wrong.")
    return int(wrong > 0)


def all_claims() -> Iterator[Claims]:
    """The claims of every page."""
    for path in sorted(CLAIMS.glob("*.toml")):
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        parts = (tuple(filter(None, map(str.strip, document[key].splitlines()))) for key in ("measured", "settings"))
        yield Claims(document["page"], *parts)


def read(text: str, claims: Claims) -> Reading:
    """Compare the page with its claims. Where a fragment stands once with another figure, the corrected text has it."""
    problems, covered, corrected = list[str](), list[tuple[int, int]](), text
    for fragment in claims.measured:
        values = [value_of(slot) for slot in SLOT.findall(fragment)]
        pattern = pattern_of(fragment, values)
        matches = list(pattern.finditer(text))
        right = [match for match in matches if agrees(match, values)]
        covered += [match.span() for match in right]
        if right:
            continue
        if not matches:
            problems.append(f"nothing like: {fragment}")
            continue
        for match in matches:
            problems.append(f"stated: {' '.join(match[0].split())}\n    computed: {rendered(match, values)}")
        if len(matches) == 1 and pattern.search(corrected):
            corrected = pattern.sub(lambda match, values=values: rendered(match, values), corrected, count=1)  # type: ignore[misc]
    bare = NOT_TEXT.sub(lambda match: " " * len(match[0]), text)
    for fragment in claims.settings:
        spans = [match.span() for match in pattern_of(fragment, []).finditer(text)]
        covered += spans
        problems += [] if spans else [f"no such setting: {fragment}"]
    for match in MEASUREMENT.finditer(bare):
        if not any(start <= match.start() and match.end() <= end for start, end in covered):
            around = " ".join(text[max(0, match.start() - 60) : match.end() + 40].split())
            problems.append(f"no claim has {' '.join(match[0].split())}: ... {around} ...")
    return Reading(tuple(problems), tuple(covered), corrected)


def value_of(slot: str) -> Value:
    """The figure of a slot: a measure's name, and its words as in a shell."""
    name, *words = shlex.split(slot)
    return MEASURES[name](*words)


def pattern_of(fragment: str, values: Sequence[Value]) -> re.Pattern[str]:
    """The fragment with any figures of these kinds, across line breaks."""
    parts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in SLOT.split(fragment)[::2]]
    figures = [_figure(value) for value in values]
    return re.compile("".join(part + figure for part, figure in zip(parts, [*figures, ""], strict=True)))


def _figure(value: Value) -> str:
    if isinstance(value, tuple):
        return rf"({PRINTED}\s+\[{PRINTED},\s+{PRINTED}\])"
    # A word may stand where a number would, such as `never`.
    return rf"({PRINTED})" if not isinstance(value, str) else rf"({PRINTED}(?:\s+of\s+(?:the\s+)?\d+)?|[a-z]+)"


def agrees(match: re.Match[str], values: Sequence[Value]) -> bool:
    """True where every figure is the computed one, as far as it is printed."""
    return all(_agrees(text, value) for text, value in zip(match.groups(), values, strict=True))


def _agrees(text: str, value: Value) -> bool:
    if isinstance(value, str):
        return " ".join(text.split()) == value
    numbers = re.findall(PRINTED, text)
    expected = value if isinstance(value, tuple) else (value,)
    return all(near(number, part) for number, part in zip(numbers, expected, strict=True))


def near(text: str, value: float) -> bool:
    """A printed number against the computed one; counts are exact."""
    number, step = parsed(text)
    if isinstance(value, int):
        return number == value
    # Values of runs have four digits in the files, so a half may have been rounded to the other side.
    return abs(number - value) <= step * 0.505 + 1e-12


def parsed(text: str) -> tuple[float, float]:
    """A printed number and the step of its last printed digit; zeros at the end of 1,450 are not digits."""
    plain, percent = text.replace(",", "").removesuffix("%"), text.endswith("%")
    mantissa, _, exponent = plain.partition("e")
    decimals = len(mantissa.partition(".")[2])
    zeros = len(mantissa) - len(mantissa.rstrip("0")) if "." not in mantissa and mantissa.strip("+-0") else 0
    scale = 10.0 ** int(exponent or 0) / (100 if percent else 1)
    return float(mantissa) * scale, 10.0 ** (zeros - decimals) * scale


def rendered(match: re.Match[str], values: Sequence[Value]) -> str:
    """The matched text with the computed figures, at the precision of the figures in their place."""
    text, start = match[0], match.start()
    for group, value in reversed(list(enumerate(values, start=1))):
        begin, end = (place - start for place in match.span(group))
        text = text[:begin] + _rendered(match[group], value) + text[end:]
    return text


def _rendered(text: str, value: Value) -> str:
    if isinstance(value, str):
        return value
    parts = iter(value if isinstance(value, tuple) else (value,))
    return re.sub(PRINTED, lambda number: _printed(number[0], next(parts)), text)


def _printed(text: str, value: float) -> str:
    sign = "+" if text.startswith("+") else ""
    percent = "%" if text.endswith("%") else ""
    value = value * 100 if percent else value
    plain = text.removesuffix("%").replace(",", "").lstrip("+-")
    mantissa, _, exponent = plain.partition("e")
    decimals = len(mantissa.partition(".")[2])
    if exponent:
        power = f"{value:{sign}.{decimals}e}"
        head, _, tail = power.partition("e")
        return f"{head}e{int(tail)}{percent}"
    _, step = parsed(plain)
    value = round(value / step) * step if step > 1 else value
    return f"{value:{sign}{',' if ',' in text else ''}.{decimals}f}{percent}"


if __name__ == "__main__":
    sys.exit(main())
