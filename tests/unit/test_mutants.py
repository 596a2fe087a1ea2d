"""The table of mutants fits the source: each changes one place that exists, and names tests that exist."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutants.table import SOURCES, Mutant, read

ROOT = Path(__file__).parents[2]
MUTANTS = list(read())
SOURCE = """
class Judge:
    def keeps(self, ratio):
        return low <= ratio  # the limit is kept


def other(ratio):
    return low <= ratio
"""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.rule}")
def test_it_can_be_run(mutant: Mutant, tmp_path: Path) -> None:
    (tmp_path / mutant.file).parent.mkdir(parents=True)
    shutil.copyfile(ROOT / mutant.file, tmp_path / mutant.file)
    mutant.apply(tmp_path)
    compile((tmp_path / mutant.file).read_text(), mutant.file, "exec")
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), f"{file} does not exist"
        assert name.partition("[")[0] in (ROOT / file).read_text() if name else True, f"{file} has no {name}"


def test_a_rule_has_one_mutant() -> None:
    rules = [(mutant.file, mutant.rule) for mutant in MUTANTS]
    assert len(rules) == len(set(rules)) <= 150


def place(folder: Path, text: str = SOURCE, name: str = "judge.py") -> None:
    path = folder / SOURCES[0] / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def mutant_of(function: str, old: str = "low <= ratio", new: str = "low < ratio") -> Mutant:
    return Mutant(f"{SOURCES[0]}/judge.py", function, "the limit is dropped", old, new, ())


def test_layout_and_the_place_in_a_function_do_not_matter(tmp_path: Path) -> None:
    place(tmp_path, SOURCE.replace("return low <= ratio  #", "if True:\n            return (\n low <=\n ratio)  #"))
    mutant_of("Judge.keeps").apply(tmp_path)
    changed = (tmp_path / SOURCES[0] / "judge.py").read_text()
    assert changed.count("low < ratio") == changed.count("low <= ratio") == 1
    assert changed.index("low < ratio") < changed.index("low <= ratio")


@pytest.mark.parametrize(
    ("mutant", "says"),
    [
        (mutant_of(""), "stands 2 times in the module of moe_trm/judge.py, expected once"),
        (mutant_of("other", new="low  <=  ratio"), "stands 1 times in other"),
        (mutant_of("other", old="ratio >= low"), "`ratio >= low` stands 0 times in other of moe_trm/judge.py"),
        (mutant_of("Judge.drops"), "moe_trm/judge.py has no Judge.drops$"),
    ],
)
def test_an_anchor_that_is_gone_is_named(mutant: Mutant, says: str, tmp_path: Path) -> None:
    place(tmp_path)
    with pytest.raises(LookupError, match=says):
        mutant.apply(tmp_path)


def test_a_function_that_has_moved_is_found(tmp_path: Path) -> None:
    place(tmp_path, name="elsewhere.py")
    with pytest.raises(LookupError, match=r"judge\.py is gone; Judge\.keeps is in moe_trm/elsewhere\.py"):
        mutant_of("Judge.keeps").apply(tmp_path)
