"""What the pages tell people to type, to set, to watch and to open exists."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from moe_trm.cli import COMMANDS, main, parse
from moe_trm.config.fields import lookup, walk
from moe_trm.config.schema import Config
from moe_trm.config.schema.method_name import OneOf

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


@pytest.mark.parametrize("target", named(r"(?:`|^)make (\.?[a-z][a-z-]*)\b(?= |`|$)"))
def test_make_targets_exist(target: str) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("module", named(r"(?:python|torchrun)\b[^`\n]*? -m ([a-z_]+(?:\.[a-z_]+)*)"))
def test_modules_exist(module: str) -> None:
    assert find_spec(module) is not None


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
    for word in words:
        assert not word.startswith("configs/") or (REPOSITORY / word).is_file()
        assert "=" not in word or lookup(word.partition("=")[0]) is not None


def test_settings_may_stand_behind_options() -> None:
    args = parse(["train", "a.yaml", "seed=1", "--nproc-per-node", "2", "replay.mode=R2"])
    assert (args.overrides, args.nproc_per_node) == (["seed=1", "replay.mode=R2"], 2)
    with pytest.raises(SystemExit, match="2"):
        parse(["train", "a.yaml", "--no-such-option"])
    with pytest.raises(SystemExit, match="2"):
        parse(["report", "runs/a", "runs/b", "--out", "x.html", "runs/c"])


def test_options_of_benchmarks_exist() -> None:
    """Every `--option` behind `python -m benchmarks.NAME`, in the source of that benchmark or of what all share."""
    shared = (REPOSITORY / "benchmarks" / "options.py").read_text(encoding="utf-8")
    calls = named(r"python -m benchmarks\.([a-z_]+ [^`\n]*--[^`\n]*)")
    for name, _, words in (call.partition(" ") for call in calls):
        source = (REPOSITORY / "benchmarks" / f"{name}.py").read_text(encoding="utf-8") + shared
        for option in re.findall(r"--[a-z][a-z-]*", words):
            assert f'"{option}"' in source, f"python -m benchmarks.{name} {option}"


@pytest.mark.parametrize("key", named(rf"`({KEY})(?<!\.py)(?<!\.log)(?<!\.certificate)(?=[`=:])"))
def test_settings_exist(key: str) -> None:
    assert lookup(key) is not None


@pytest.mark.parametrize(("key", "value"), named(rf"[`' \[]({KEY})(?:=|: )([A-Za-z][A-Za-z0-9_-]*)(?=[`' \n])"))
def test_values_of_settings_are_possible(key: str, value: str) -> None:
    setting = lookup(key)
    assert setting is not None, key
    choices = {str(choice) for choice in literals(setting.annotation)}
    assert not choices or value in choices, f"{key}={value}: {sorted(choices)}"


def literals(annotation: object) -> list[object]:
    """The values that a type of literals, or of names of a table, allows; none for other types."""
    if isinstance(annotation, OneOf):
        return list(annotation.known)
    inner = [value for argument in get_args(annotation) for value in literals(argument)]
    return inner or [value for value in get_args(annotation) if isinstance(value, str)]


ANYTHING = r"[^/ ]+"


@cache
def names_written() -> list[re.Pattern[str]]:
    """What the code can put between two slashes of a name: its literals and f-strings, docstrings left out."""
    found = set()
    for path in [*(REPOSITORY / "moe_trm").rglob("*.py"), *(REPOSITORY / "routing").glob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                found |= {re.escape(part) for part in node.value.split("/")}
            if isinstance(node, ast.JoinedStr):
                pieces = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                found |= {re.escape(part).replace("\0", ANYTHING) for part in "".join(pieces).split("/")}
    return [re.compile(part) for part in found if re.search("[a-z]{2}|_[a-z]$", part.replace(ANYTHING, ""))]


def can_be_written(name: str) -> bool:
    """Whether `name` is one of these; with `*` at its end, whether one begins so."""
    if name.endswith("*"):
        return any(known.pattern.startswith(name[:-1]) for known in names_written())
    return any(known.fullmatch(name) for known in names_written())


METRIC_FOLDERS = (
    "acceptance|batch|correction|engine|eval|kl|lag|ledger|loss|optimizer|pipeline|policy|probe|queue|records|reference|replay|response|reward|"
    "rollout|routing|sampling_mask|staleness|time|total|trm|turns|update|verdict|weights"
)


@pytest.mark.parametrize("metric", named(rf"`((?:{METRIC_FOLDERS})/[a-zA-Z0-9_/<>*]+)`"))
def test_metrics_exist(metric: str) -> None:
    """Each part of a metric's name is one that the code can write; `<name>` stands for any name, `*` for any ending."""
    parts = re.sub(r"<[a-z_]+>", "1", metric).split("/")
    unknown = [part for part in parts if not can_be_written(part) and part not in ("1", *SECTIONS.split("|"))]
    assert not unknown, metric


@pytest.mark.parametrize("reason", named(r"(?<=records/rejected/)([a-z_]+)(?=`)"))
def test_reasons_of_rejection_exist(reason: str) -> None:
    assert can_be_written(reason)


@pytest.mark.parametrize("path", named(rf"`((?:{FOLDERS})/(?:[a-z0-9_./-]*(?:/|\.[a-z]+))?)`"))
def test_files_exist(path: str) -> None:
    assert (REPOSITORY / path).exists()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for path, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^):]+)\)", PAGES[page])):
        target = (REPOSITORY / page).parent / path
        assert target.exists(), path
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings]


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
    """Every file and folder that the README's tree names exists; every package that exists is named."""
    block = PAGES["README.md"].split("## What is where")[1].split("```")[1]
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
