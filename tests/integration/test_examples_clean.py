"""The commands of the adapters' examples, as their pages have them, in environments that have nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("moe_trm", "routing", "launch", "benchmarks", "examples", "pyproject.toml", "README.md", "LICENSE")
"""The files that pip needs to build this package, and the examples themselves."""


def commands(example: str) -> list[str]:
    page = (ROOT / "examples" / example / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 1
    found: list[str] = blocks[0].splitlines()
    assert len(found) == 2
    return found


def source_of(host: str) -> str:
    """The folder of the host's own package, without those of its requirements."""
    folder = os.environ.get(f"MOE_TRM_{host.upper()}_SOURCE", "").partition(":")[0]
    if not folder:
        pytest.skip(f"MOE_TRM_{host.upper()}_SOURCE names no folder with {host}'s package")
    return folder


def ran(command: list[str] | str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PATH"] = f"{folder / 'venv' / 'bin'}:{environment['PATH']}"
    return subprocess.run(
        command,
        cwd=folder / "repository",
        env=environment,
        shell=isinstance(command, str),
        capture_output=True,
        text=True,
        check=False,
    )


def installed(example: str, folder: Path) -> Path:
    """The folder, after the first command in a new environment and a copy of what the repository has of it."""
    for part in PARTS:
        target = folder / "repository" / part
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, target)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    reached = ran("python -m pip download --quiet --no-deps --dest packages packaging", folder)
    if reached.returncode:
        pytest.skip(f"no package index can be reached: {reached.stderr.strip().splitlines()[-1]}")
    done = ran(commands(example)[0], folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def used(example: str, folder: Path, **placeholders: str) -> list[dict[str, Any]]:
    """The lines of JSON that the second command prints."""
    use = commands(example)[1]
    for name, value in placeholders.items():
        use = re.sub(rf"\b{name}\b", value, use)
    done = ran(use, folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


@pytest.mark.parametrize("example", ["trl", "slime", "verl", "vllm"])
def test_an_example_is_two_commands_on_files_that_exist(example: str) -> None:
    install, use = commands(example)
    assert install == f"python -m pip install -r examples/{example}/requirements.txt"
    assert (ROOT / install.split()[-1]).is_file()
    assert (ROOT / use.split()[1]).is_file()


def test_the_stored_answer_of_vllm_is_read() -> None:
    """In this environment; nothing of the example needs another."""
    words = commands("vllm")[1].split()
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert (found["tokens"], found["routed"]) == (7, 6)
    assert found["could_choose_from"] == [2, 1, 3, 1]
    assert [len(set(experts)) for experts in found["first_experts"]] == [2, 2]


@pytest.mark.slow
def test_trl(tmp_path: Path) -> None:
    lines = used("trl", installed("trl", tmp_path))
    assert len(lines) == 4
    for line in lines:
        assert line["routing/applied_fraction"] == 1.0
        assert 0 < line["correction/kept_fraction"] <= 1
        assert {"loss", "reward", "merged/k3_kl", "acceptance/length_1_16", "routing/local_flip_rate"} <= line.keys()


@pytest.fixture(scope="module")
def slimes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One environment for slime and miles, not made where neither is there."""
    if not any(os.environ.get(f"MOE_TRM_{host}_SOURCE") for host in ("SLIME", "MILES")):
        pytest.skip("MOE_TRM_SLIME_SOURCE and MOE_TRM_MILES_SOURCE name no folder")
    return installed("slime", tmp_path_factory.mktemp("slime"))


@pytest.mark.slow
@pytest.mark.parametrize("host", ["slime", "miles"])
def test_slime_and_miles(host: str, slimes: Path) -> None:
    (line,) = used("slime", slimes, FOLDER=source_of(host), HOST=host)
    assert line["host"] == host
    assert line["moe_trm/kept"] == 2.0
    assert line["gradient_norm"] > 0
    assert line["routes"] == [3, 2, 2]


@pytest.mark.slow
def test_verl(tmp_path: Path) -> None:
    source = source_of("verl")
    (line,) = used("verl", installed("verl", tmp_path), FOLDER=source)
    assert line["tokens_with_gradient"] == [0, 1, 4]
    assert line["response_mask_sum"] == 8
    assert 0 < line["kept_fraction"] < 1
