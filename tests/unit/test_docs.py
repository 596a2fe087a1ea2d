"""Commands, settings, metrics and files that the pages name exist."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from moe_trm.cli import COMMANDS, main, parse
from moe_trm.config.fields import lookup, walk
from moe_trm.config.load import parse_override
from moe_trm.config.schema import Config
from tests.unit import metric_names

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = {
    str(page.relative_to(REPOSITORY)): page.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/*.md", "examples/*/*.md", "benchmarks/RESULTS.md", "packages/*/*.md")
    for page in sorted(REPOSITORY.glob(pattern))
}
TEXT = "\n".join([*PAGES.values(), *(setting.doc for setting in walk())])
"""All pages, and the documentation of every setting."""
FOLDERS = "benchmarks|configs|docs|examples|launch|moe_trm|packages|requirements|routing|tests"
SECTIONS = "|".join(name for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields"))
KEY = rf"(?:{SECTIONS})(?:\.[a-z][a-z0-9_]*)+"


def named(pattern: str) -> list[str]:
    found = sorted(set(re.findall(pattern, TEXT, re.MULTILINE)))
    assert found, f"the pages name nothing like {pattern}"
    return found


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([^\s:]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert not {*named(r"(?:`|^)make (\.?[a-z][a-z-]*)\b(?= |`|$)")} - {*targets}


@pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils")
def test_modules_exist() -> None:
    modules = named(r"(?:python|torchrun)\b[^`\n]*? -m ([a-z_]+(?:\.[a-z_]+)*)")
    assert not [module for module in modules if find_spec(module) is None]


@pytest.mark.parametrize(
    "command", named(r"[`\n]moe-trm ([a-z]+(?: (?:show|explain|diff|from-[a-z]+))?)(?= [A-Za-z\[]|`)")
)
def test_commands_have_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    assert f"usage: moe-trm {command}" in capsys.readouterr().out


@pytest.mark.parametrize("example", [f"{command.name} {one}" for command in COMMANDS for one in command.examples])
def test_examples_in_the_help_are_right(example: str) -> None:
    words = shlex.split(example.partition(" > ")[0])
    parse(words)
    for before, word in pairwise(words):
        assert not word.startswith("configs/") or (REPOSITORY / word).is_file()
        assert "=" not in word or before.startswith("--") or lookup(word.partition("=")[0]) is not None


def test_settings_may_stand_behind_options() -> None:
    args = parse(["train", "a.yaml", "seed=1", "--nproc-per-node", "2", "replay.mode=R2"])
    assert (args.overrides, args.nproc_per_node) == (["seed=1", "replay.mode=R2"], 2)
    with pytest.raises(SystemExit, match="2"):
        parse(["train", "a.yaml", "--no-such-option"])
    with pytest.raises(SystemExit, match="2"):
        parse(["report", "runs/a", "runs/b", "--out", "x.html", "runs/c"])


def test_options_of_benchmarks_exist() -> None:
    """Every `--option` behind a benchmark or a drill, in its source or in the source of what it imports."""
    calls = named(r"python -m ((?:benchmarks|tests\.drills)\.[a-z_]+ [^`\n]*--[^`\n]*)")
    for name, _, words in (call.partition(" ") for call in calls):
        own = (REPOSITORY / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        names = re.findall(r"from benchmarks\.(\w+) import", own)
        source = own + "".join((REPOSITORY / "benchmarks" / f"{one}.py").read_text(encoding="utf-8") for one in names)
        for option in re.findall(r"--[a-z][a-z-]*", words):
            assert f'"{option}"' in source, f"python -m {name} {option}"


def test_settings_exist() -> None:
    assert not [key for key in named(rf"`({KEY})(?<!\.py)(?<!\.log)(?=[`=:])") if lookup(key) is None]


PLACEHOLDER = re.compile("[A-Z]+(:[A-Z]+)?")


def is_possible(key: str, value: str) -> bool:
    """True if the setting exists and takes this value, or if the value is a placeholder."""
    if (setting := lookup(key)) is None:
        return False
    # YAML reads a bare `off` as false; the fields that have such a word take both.
    parsed = value if value in ("on", "off") else parse_override(f"{key}={value}")[1]
    annotation: Any = setting.annotation
    try:
        TypeAdapter(annotation).validate_python(parsed)
    except ValidationError:
        return bool(PLACEHOLDER.fullmatch(value))
    return True


def test_values_of_settings_are_possible() -> None:
    pairs = named(rf"[`' \[]({KEY})(?:=|: )([A-Za-z0-9][\w.:+-]*)(?=[`' \n])")
    assert not [pair for pair in pairs if not is_possible(*pair)]


@pytest.mark.parametrize(
    ("key", "value"), [("replay.mode", "R4"), ("train.steps", "many"), ("learner.freeze_router", "maybe")]
)
def test_impossible_values_are_noticed(key: str, value: str) -> None:
    assert not is_possible(key, value)


def test_defaults_are_those_of_the_settings() -> None:
    """In the table of long runs, and of learner ranks that died in the README's words."""
    rows = re.findall(rf"^\| `({KEY})` \| `?([\w.]+)`? \|", PAGES["docs/long_runs.md"], re.MULTILINE)
    assert len(rows) > 5
    for key, default in [*rows, ("train.max_restarts", "0")]:
        setting = lookup(key)
        assert setting is not None
        assert parse_override(f"{key}={default}")[1] == setting.default, key
    assert "up to `train.max_restarts` times, by default not at all" in " ".join(PAGES["README.md"].split())


def test_metrics_exist() -> None:
    folders = metric_names.folders()
    named_here = [
        name for name in named(r"`([a-z_]+/(?:[a-zA-Z0-9_/<>*{},]|\.(?=\d))+)`") if name.split("/")[0] in folders
    ]
    assert len(named_here) > 100
    for metric in named_here:
        before, _, choices = metric.partition("{")
        inner, _, after = choices.partition("}")
        for choice in inner.split(","):
            name = before + choice + after
            assert metric_names.exists(name) or (REPOSITORY / name).exists(), name


def test_reasons_of_rejection_exist() -> None:
    assert not {*named(r"(?<=records/rejected/)([a-z_]+)(?=`)")} - {*metric_names.reasons()}


def test_files_exist() -> None:
    paths = named(rf"`((?:{FOLDERS})/(?:[a-z0-9_./-]*(?:/|\.[a-z]+))?)`")
    assert not [path for path in paths if not (REPOSITORY / path).exists()]


def anchors(page: Path) -> list[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_links_lead_somewhere() -> None:
    links = [(page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^):]+)\)", text)]
    lost = []
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = (REPOSITORY / page).parent / path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(f"{page}: {link}")
    assert len(links) > 100
    assert not lost


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page not in PAGES:
            continue
        reached.add(page)
        for link in re.findall(r"\]\(([^):#]+)", PAGES[page]):
            target = ((REPOSITORY / page).parent / link).resolve()
            waiting.append(str(target.relative_to(REPOSITORY)))
    unreached = {page for page in PAGES if page.startswith(("docs/", "examples/")) and page not in reached}
    assert not unreached


def test_the_tree_is_the_tree() -> None:
    """Every file and folder that the tree of the walk names exists; every package that exists is named."""
    block = PAGES["docs/walk.md"].split("## What is where")[1].split("```")[1]
    folders: list[str] = []
    for line in block.splitlines():
        names = re.match(r"( *)((?:[\w./]+ +)*?[\w./]+/?)(?:  +|$)", line)
        if not names:
            continue
        depth = len(names[1]) // 2
        for name in names[2].split():
            path = REPOSITORY.joinpath(*folders[:depth], name)
            assert path.exists(), f"{path} of line {line!r}"
        folders[depth:] = [name]
    for package in (REPOSITORY / "moe_trm").glob("*/__init__.py"):
        assert f"{package.parent.name}/" in block, package.parent.name
