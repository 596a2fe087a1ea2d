"""The table of mutants, read from the TOML files beside this module."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One change of one file, and the tests that must fail with it."""

    name: str
    """Short description of what is wrong with the mutant."""
    file: str
    """Path from the root of the repository."""
    old: str
    """Text that stands exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: files or node ids."""
    equivalent: str = ""
    """The reason why no test can notice, for a mutant that computes the same. It is not run."""

    def apply(self, root: Path) -> str:
        """Change the file below `root`; its text as it was.

        Raises:
            LookupError: `old` does not stand exactly once in the file, or `new` is no change.
        """
        path = root / self.file
        text = path.read_text()
        found = text.count(self.old)
        if found != 1 or self.old == self.new:
            raise LookupError(f"{self.name}: {self.old!r} stands {found} times in {self.file}, expected once")
        path.write_text(text.replace(self.old, self.new))
        return text


def read(folder: Path = FOLDER) -> Iterator[Mutant]:
    """All mutants, file by file."""
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            yield Mutant(**{**entry, "tests": tuple(entry.get("tests", ()))})
