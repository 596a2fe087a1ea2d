"""The shell commands of README and of the pages that a newcomer opens first, run as they stand there.

The working folder has the files that they name, under the names that they have there: `CONFIG.yaml`, `runs/NAME`.
`ELSEWHERE` names what holds the others: a test of the same command on other arguments, or of its parts where it takes
long or needs the network.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moe_trm.cli import parse
from moe_trm.config import load
from tests.integration.jobs import CONFIG

ROOT = Path(__file__).parents[2]
PAGES = (
    *("README.md", "docs/install.md", "docs/tasks.md", "docs/report.md", "docs/healthy.md"),
    *("docs/trained_model.md", "docs/bundles.md"),
)
ELSEWHERE = {
    "make quickstart": ".ci/run",
    "make collapse": "tests/unit/benchmarks/test_router_noise.py",
    "make test": ".ci/run",
    "make gpu-env": ".ci/run",
    "python -c 'import torch": ".ci/run",
    "NVTE_BUILD_USE_NVIDIA_WHEELS=1 pip install": "requirements/gpu.txt",  # needs a compiler for GPUs
    ". .venv/bin/activate": ".ci/run",
    "moe-trm doctor CONFIG.yaml": "tests/integration/test_doctor.py",
    "moe-trm doctor RUN --grown": "tests/integration/test_growth.py",
    "moe-trm audit": "tests/integration/test_audit.py",
    "moe-trm plan CONFIG.yaml": "tests/unit/tools/plan",  # of a published model
    "moe-trm experiment FILE.yaml": "tests/integration/test_experiment.py",
    "export MOE_TRM_API_KEY": "tests/integration/test_end_to_end.py",
    "python -m launch.rollout": "tests/integration/test_end_to_end.py",
    "torchrun --nproc-per-node 2": "tests/integration/test_end_to_end.py",
    "python -m benchmarks.route_flip": "tests/integration/test_route_flip.py",
    "python -m benchmarks.mask_rate": "tests/unit/benchmarks/test_mask_rate.py",
    "python -m benchmarks.all": "tests/unit/benchmarks",
    "python -m benchmarks.gpu": "tests/integration/test_gpu_rehearsal.py",
    "pip install 'moe-trm[tensorboard]'": "pyproject.toml",  # the network
    "moe-trm train CONFIG.yaml 'observe.sinks=[tensorboard]'": "tests/unit/observe",
}
"""Commands that are not run here, by how they begin, and the file or folder that holds them, whole or in parts."""
SHORT = {"--step 40": "--step 2", "task.reward=my_task.py:reward": "task.reward=my_task.py:reward --by learner"}
"""What is shorter here: steps, and a second server."""
PATIENCE_S = 600.0
TASK = """
from moe_trm.tasks import RewardInput


def reward(sample: RewardInput) -> float:
    return sum(sample.completion_ids) % 5 / 4
"""


def commands(page: str) -> list[str]:
    """The lines of the page's shell blocks, without comments and without what is optional."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = (re.sub(r"(^|\s+)#\s.*$", "", line) for block in blocks for line in block.splitlines())
    return [re.sub(r"\s\[[^\]]*\]", "", line).strip() for line in lines if line.strip()]


def home(command: str) -> str | None:
    """The file or folder in which the command is held, None where it is run here."""
    return next((path for start, path in ELSEWHERE.items() if command.startswith(start)), None)


@pytest.fixture
def folder(brief_checkpoint: Path, tmp_path: Path) -> Path:
    """What the pages' commands name."""
    settings = yaml.safe_load(CONFIG.format(name="NAME", run_dir="runs", checkpoint=brief_checkpoint, steps=2))
    settings["train"]["export"] = True
    settings["checkpoint"] = {"every": 1}
    settings["record"] = {"bundle": "BUNDLE"}
    settings["task"]["reward"] = "my_task.py:reward"
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "CONFIG.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    (tmp_path / "runs").mkdir()
    for link, target in {"bundle": "../BUNDLE", "A": "NAME", "B": "NAME"}.items():
        (tmp_path / "runs" / link).symlink_to(target)
    (tmp_path / "FOLDER").symlink_to("runs/NAME/checkpoints/final")
    return tmp_path


def test_every_command_is_run_here_or_elsewhere() -> None:
    every_command = [command for page in PAGES for command in commands(page)]
    for start, path in ELSEWHERE.items():
        assert any(command.startswith(start) for command in every_command), f"no page has {start!r} any more"
        assert (ROOT / path).exists(), path
    run_here = [command for command in every_command if home(command) is None]
    assert len(run_here) > 10
    assert not [command for command in run_here if not command.startswith("moe-trm ")]


def test_the_command_line_takes_every_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options and settings as the pages write them. `test_the_commands_of_the_pages` runs them."""
    monkeypatch.chdir(folder)
    for command in (command for page in PAGES for command in commands(page)):
        if home(command) is None:
            arguments = parse(shlex.split(command)[1:])
            if arguments.command == "train":
                load(arguments.config, arguments.overrides)


@pytest.mark.long
def test_the_commands_of_the_pages(folder: Path) -> None:
    """In the order of the pages: train, look at the run, evaluate, export, try other rules on what it recorded."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    for command in (command for page in PAGES for command in commands(page)):
        if home(command) is not None:
            continue
        for words, shorter in SHORT.items():
            command = command.replace(words, shorter)
        shell = [shutil.which("bash") or "/bin/bash", "-c", command]
        done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
