"""What the README tells people to type exists."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_trm.config.fields import lookup

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def commands(pattern: str) -> list[str]:
    found = sorted(set(re.findall(pattern, TEXT)))
    assert found, f"the pages name no command like {pattern}"
    return found


@pytest.mark.parametrize("target", commands(r"\bmake (\.?[a-z][a-z-]*)\b(?= |`|$)"))
def test_make_targets_exist(target: str) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("module", commands(r"(?:python|torchrun)\b[^`\n]*? -m ([a-z_]+(?:\.[a-z_]+)*)"))
def test_modules_exist(module: str) -> None:
    assert find_spec(module) is not None


@pytest.mark.parametrize("command", commands(r"`?moe-trm ([a-z]+(?: (?:show|explain|diff))?)"))
def test_commands_have_help(command: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "moe_trm", *command.split(), "--help"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "usage: moe-trm" in answer.stdout


@pytest.mark.parametrize(
    "key",
    commands(
        r"`((?:model|task|rollout|replay|probe|correction|loss|optimizer|learner|sync|train|record|sampling_mask|pipeline|checkpoint|batch|eval|kl|observe|advantage)\.[a-z_.]+)`"
    ),
)
def test_configuration_keys_exist(key: str) -> None:
    lookup(key)


@pytest.mark.parametrize("path", commands(r"\]\(([^)#:]+)\)"))
def test_links_lead_somewhere(path: str) -> None:
    assert (REPOSITORY / path).exists()


def test_the_tree_is_the_tree() -> None:
    """Every file and folder that the README's tree names exists; every package that exists is named."""
    block = TEXT.split("## What is where")[1].split("```")[1]
    folder = ""
    for line in block.splitlines():
        names = re.match(r"( *)((?:[\w./]+ +)*?[\w./]+/?)(?:  +|$)", line)
        if not names:
            continue
        for name in names[2].split():
            if not names[1]:
                folder = name
            path = REPOSITORY / (folder + "/" + name if names[1] else name)
            assert path.exists(), f"{path} of line {line!r}"
    for package in (REPOSITORY / "moe_trm").glob("*/__init__.py"):
        assert f"{package.parent.name}/" in block, package.parent.name
