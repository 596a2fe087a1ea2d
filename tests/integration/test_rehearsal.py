"""`moe-trm doctor CONFIG --no-probe`: shipped configurations are judged without GPUs and without checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from moe_trm.cli import main
from moe_trm.config import load
from moe_trm.learner.megatron.cpu_shim import import_uncompiled
from moe_trm.learner.megatron.layers import Layers
from moe_trm.learner.megatron.switches import switches
from moe_trm.tools.doctor import rehearsal
from tests.integration.engine_contract.conftest import skip_without
from tests.published_models import published_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron-Core's import

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
FEW = ("quickstart", "deepspeed", "qwen3_30b_a3b_4_nodes")
"""One of each kind; CI judges the others as well."""
CLUSTER = [path for path in CONFIGS if load(path).rollout.server.tensor_parallel > 1]
WITHOUT_DRIVER = "not judged: the kernels of sglang that are installed here load only where libcuda.so.1 of a driver is"
NEEDS_SGLANG = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")


def test_there_are_eight_for_clusters_and_they_prove_their_pushes() -> None:
    assert len(CLUSTER) == 8
    for path in CLUSTER:
        config = load(path)
        assert (config.rollout.server.tensor_parallel, config.sync.verify) == (8, True), path.stem


class Judge:
    """In place of `subprocess` in the rehearsal: one process imports SGLang for the arguments of all."""

    def __init__(self) -> None:
        environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.integration.judge_arguments"]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, text=True, env=environment)

    def run(self, command: Sequence[str], **_: Any) -> Any:
        start = [*command].index("-c") + 1
        self.process.stdin.write(json.dumps([command[start], command[start + 1 :]]) + "\n")
        self.process.stdin.flush()
        code, out, err = json.loads(self.process.stdout.readline())
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    judge.process.stdin.close()
    judge.process.stdout.close()
    judge.process.wait()


@pytest.fixture
def judged(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "subprocess", judge)


def doctor(path: Path, folder: Path, *overrides: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and status and words of each check."""
    overrides = (f"run_dir={folder}", "rollout.server.port=0", *overrides)
    code = main(["doctor", str(path), *overrides, "--no-probe", "--json", str(folder / "checks.json")])
    checks = json.loads((folder / "checks.json").read_text(encoding="utf-8"))["checks"]
    return code, {check["name"]: (check["status"], check["says"]) for check in checks}


def skip_unjudged(checks: dict[str, tuple[str, str]]) -> None:
    """Skip this test where nothing judges the arguments of a server: in the GPU environment without a driver."""
    status, reason = checks["server's arguments"]
    if status == "skip" and WITHOUT_DRIVER in reason:
        pytest.skip(reason)


@NEEDS_SGLANG
@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=() if path.stem in FEW else pytest.mark.long) for path in CONFIGS],
)
def test_every_shipped_configuration_passes(path: Path, tmp_path: Path) -> None:
    config = load(path)
    skip_without("vllm" if config.rollout.engine == "vllm" else "")
    # A checkpoint that somebody put there would be judged in its place.
    code, checks = doctor(path, tmp_path, f"model.checkpoint=absent/{Path(config.model.checkpoint).name}")
    assert code == 0, {name: says for name, (status, says) in checks.items() if status == "fail"}
    if path in CLUSTER and checks["server's arguments"][0] == "skip":
        assert WITHOUT_DRIVER in checks["server's arguments"][1]
        assert checks["proof of pushes"] == ("skip", "not judged: the settings of the server are not known")
    elif path in CLUSTER:
        assert checks["server's arguments"] == ("ok", "sglang accepts them, for cuda")
        assert checks["proof of pushes"][0] == "ok"
        assert "predicted, for each of 8 ranks" in checks["proof of pushes"][1]
    if config.learner.backend == "megatron":
        assert "billion parameters on a rank" in checks["layout in Megatron-Core"][1]


@NEEDS_SGLANG
@pytest.mark.usefixtures("judged")
def test_what_megatron_the_engine_or_the_proof_refuses_is_a_failed_check(tmp_path: Path) -> None:
    wrong = "rollout.server.extra_args=[--tokenizer-mode, telepathy]"
    code, checks = doctor(ROOT / "configs" / "qwen3_30b_a3b_4_nodes.yaml", tmp_path, wrong)
    skip_unjudged(checks)
    assert code == 1
    assert checks["server's arguments"][0] == "fail"
    assert "telepathy" in checks["server's arguments"][1]


@pytest.mark.long
@NEEDS_SGLANG
@pytest.mark.usefixtures("judged")
def test_a_server_whose_checksums_are_unknown_is_proved_by_use_or_refused(tmp_path: Path) -> None:
    kernels = "rollout.server.extra_args=[--moe-runner-backend, flashinfer_trtllm]"
    path = ROOT / "configs" / "qwen3_30b_a3b_4_nodes.yaml"
    _, checks = doctor(path, tmp_path, kernels)
    skip_unjudged(checks)
    assert "every push is proved by use" in checks["proof of pushes"][1], checks
    assert "moe_runner_backend=flashinfer_trtllm" in checks["proof of pushes"][1]
    code, checks = doctor(path, tmp_path, kernels, "sync.prove_every=0")
    assert (code, checks["proof of pushes"][0]) == (1, "fail")


def test_too_few_gpus_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    accepting = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=0, stdout="{}"))
    monkeypatch.setattr(rehearsal, "subprocess", accepting)
    monkeypatch.setattr("launch.start.places.visible_gpus", lambda: ("0", "1", "2", "3"))
    assert main(["doctor", str(CLUSTER[0]), "--no-probe"]) == 1
    assert "FAIL   GPUs: too few GPUs on this machine" in capsys.readouterr().out


NO_DRIVER = "libcuda.so.1: cannot open shared object file: No such file or directory"
TRACEBACK = 'Traceback (most recent call last):\n  File "<string>", line 3, in <module>\n'


@pytest.mark.parametrize(
    ("stderr", "status"),
    [
        (f"{TRACEBACK}ImportError: no kernels\n- ImportError: {NO_DRIVER}\n", "skip"),
        (f"{TRACEBACK}ImportError: cannot import name 'PreTrainedModel' from 'transformers'\n", "fail"),
        (f"warning: ImportError: {NO_DRIVER}\n{TRACEBACK}ValueError: unknown tokenizer mode\n", "fail"),
        (f"{TRACEBACK}ImportError: {NO_DRIVER}\n\n{TRACEBACK}SystemExit: 2\n", "fail"),
    ],
    ids=["no driver", "another import", "a warning about the driver", "a refusal behind it"],
)
def test_arguments_are_not_judged_where_kernels_find_no_driver(
    stderr: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=1, stdout="", stderr=stderr))
    monkeypatch.setattr(rehearsal, "subprocess", ending)
    code, checks = doctor(CLUSTER[0], tmp_path)
    assert (code, checks["server's arguments"][0]) == (int(status == "fail"), status)
    if status == "skip":
        assert WITHOUT_DRIVER in checks["server's arguments"][1]
        assert "-      server's arguments: not judged" in capsys.readouterr().out


def test_packed_rows_that_this_machine_chose_are_not_promised_on_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepting = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=0, stdout="{}"))
    monkeypatch.setattr(rehearsal, "subprocess", accepting)
    _, checks = doctor(ROOT / "configs" / "qwen3_30b_a3b_4_nodes.yaml", tmp_path)
    lines = checks["fast paths of Megatron-Core"][1].splitlines()
    assert "pinned snapshots: off, torch pins up to twice" in "\n".join(lines)
    assert lines[-2:] == [
        "packed rows on this machine: on",
        "packed rows on CUDA: off, packs have been proved on CPUs only",
    ]
    path = ROOT / "configs" / "qwen3_30b_a3b_4_nodes.yaml"
    _, checks = doctor(path, tmp_path, "batch.layout=packed", "sync.method=auto")
    assert checks["fast paths of Megatron-Core"][1].splitlines()[-1] == "packed rows: on"
    assert "sync.method: auto -> disk: the run starts the server" in checks["what auto became"][1]


@pytest.mark.parametrize("layers", get_args(Layers))
def test_switches_are_those_of_the_configuration(layers: Layers) -> None:
    import_uncompiled()
    from moe_trm.learner.megatron.model import transformer_config

    learner = load(ROOT / "configs" / "qwen3_30b_a3b.yaml").learner
    config = transformer_config(published_config("qwen3_30b_a3b"), learner, layers)
    of_optimizer = {"overlap_grad_reduce", "overlap_param_gather"}
    states = {key: not switch.why_off for switch in switches(layers, packed=True) for key in switch.keys}
    assert {key: getattr(config, key) for key in states if key not in of_optimizer} == {
        key: state for key, state in states.items() if key not in of_optimizer
    }
    assert not any(states[key] for key in of_optimizer)
