"""Run the tests of every mutant: `python -m tests.mutants [--only TEXT] [--workers N]`.

The tree is copied once per worker. A worker has torch and pytest imported; it changes one file of its copy, runs the
tests of that mutant in a fork, and changes the file back. The exit status is 1 when a mutant lived, when one could not
be run, or when the tests fail without any mutant.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.mutants.table import Mutant, read

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600
"""Seconds for the tests of one mutant. One that hangs them is noticed, too."""
UNUSABLE = 99
"""Exit status of a fork in which pytest could not begin."""
VERDICTS = {0: "LIVES", 1: "dies", -signal.SIGALRM: "dies (hangs)"}
"""By the exit status of pytest. Any other status means that the tests could not be run."""


def main() -> int:
    arguments = parse()
    mutants = [mutant for mutant in read() if arguments.only in f"{mutant.file} {mutant.rule}"]
    began, verdicts = time.monotonic(), list[str]()
    for place, (name, verdict) in enumerate(verdicts_of(mutants, arguments.workers), 1):
        verdicts.append(verdict)
        if arguments.verbose or not verdict.startswith("dies"):
            print(f"{place}/{len(mutants)} {verdict}: {name}", flush=True)
        elif place % 10 == 0:
            print(f"{place}/{len(mutants)} after {time.monotonic() - began:.0f} s", flush=True)
    dead = sum(verdict.startswith("dies") for verdict in verdicts)
    print(f"{dead} of {len(mutants)} mutants die after {time.monotonic() - began:.0f} s")
    return int(dead < len(mutants) or not mutants)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants with this text in their file or rule")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="name the dead ones, too")
    return parser.parse_args()


def verdicts_of(mutants: Sequence[Mutant], workers: int) -> Iterator[tuple[str, str]]:
    """Name and verdict of each mutant, as they come. Mutants of the same tests go to the same worker."""
    order = sorted(mutants, key=lambda mutant: mutant.tests)
    size = -(-len(order) // max(1, workers)) or 1
    read_end, write_end = os.pipe()
    children = [fork_worker(order[start : start + size], write_end, read_end) for start in range(0, len(order), size)]
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        for line in lines:
            name, verdict = json.loads(line)
            yield name, verdict
    for child in children:
        os.waitpid(child, 0)


def fork_worker(mutants: Sequence[Mutant], write_end: int, read_end: int) -> int:
    """A process that runs `mutants` in a copy of its own and writes one line of JSON for each."""
    child = os.fork()
    if child:
        return child
    os.close(read_end)
    with tempfile.TemporaryDirectory() as folder, os.fdopen(write_end, "w", buffering=1) as answers:
        copy = Path(folder) / "main"
        copy_tree(copy)
        work(mutants, copy, answers.write)
    os._exit(0)


def copy_tree(copy: Path) -> None:
    """The files that git knows or would add. Their bytecode is checked by hash: a change within one second counts."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    for name in names.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    if (ROOT.parent / "shared").exists():
        (copy.parent / "shared").symlink_to((ROOT.parent / "shared").resolve())
    compileall.compile_dir(copy, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def work(mutants: Sequence[Mutant], copy: Path, answer: Callable[[str], object]) -> None:
    """Run `mutants` in `copy`."""
    preload()
    healthy: dict[tuple[str, ...], bool] = {}
    for mutant in mutants:
        if mutant.tests not in healthy:
            healthy[mutant.tests] = run_tests(mutant.tests, copy) == 0
            if not healthy[mutant.tests]:
                print(printed_of(copy).read_text()[-2000:], flush=True)
        verdict = verdict_of(mutant, copy) if healthy[mutant.tests] else "CANNOT BE RUN (its tests fail without it)"
        answer(json.dumps([f"{mutant.file}: {mutant.rule}", verdict]) + "\n")


def verdict_of(mutant: Mutant, copy: Path) -> str:
    try:
        text = mutant.apply(copy)
    except LookupError as error:
        return f"CANNOT BE RUN ({error})"
    try:
        status = run_tests(mutant.tests, copy)
    finally:
        (copy / mutant.file).write_text(text)
    return VERDICTS.get(status, f"CANNOT BE RUN (pytest ends with {status})")


def preload() -> None:
    """Import what tests import and no mutant changes."""
    import pytest  # noqa: F401
    import torch  # noqa: F401


def run_tests(tests: Sequence[str], copy: Path) -> int:
    """Exit status of pytest in a fork, negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(run_pytest(tests, copy))
        finally:  # an exception
            traceback.print_exc()
            os._exit(UNUSABLE)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_pytest(tests: Sequence[str], copy: Path) -> int:
    """Exit status of pytest in `copy`, whose packages are imported anew."""
    signal.alarm(PATIENCE_S)
    printed = os.open(printed_of(copy), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(printed, number)
    os.chdir(copy)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "moe_trm", "routing")]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    os.environ.update({"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"})
    import pytest

    return pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])


def printed_of(copy: Path) -> Path:
    """The file of what the last tests in `copy` printed."""
    return copy.with_name("printed")


if __name__ == "__main__":
    sys.exit(main())
