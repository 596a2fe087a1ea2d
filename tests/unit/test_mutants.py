"""The table of mutants fits the source: each changes one place that exists, and names tests that exist."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutants.table import Mutant, read

ROOT = Path(__file__).parents[2]
MUTANTS = list(read())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.name}")
def test_it_can_be_run(mutant: Mutant, tmp_path: Path) -> None:
    (tmp_path / mutant.file).parent.mkdir(parents=True)
    shutil.copyfile(ROOT / mutant.file, tmp_path / mutant.file)
    mutant.apply(tmp_path)
    compile((tmp_path / mutant.file).read_text(), mutant.file, "exec")
    assert bool(mutant.tests) != bool(mutant.equivalent)
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), f"{file} does not exist"
        assert name.partition("[")[0] in (ROOT / file).read_text() if name else True, f"{file} has no {name}"


def test_names_are_unique() -> None:
    names = [(mutant.file, mutant.name) for mutant in MUTANTS]
    assert len(names) == len(set(names))


def test_a_text_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text("a = 1\na = 1\n")
    with pytest.raises(LookupError, match="stands 2 times"):
        Mutant("twice", "source.py", "a = 1", "a = 2", ()).apply(tmp_path)
