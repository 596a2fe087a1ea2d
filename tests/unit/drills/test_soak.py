"""The soak's view of a process and of a run's folder, and its judgement."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import Reading, reading_of, role, watch
from tests.drills.soak import Kept, place_row, process_row, state_files, steps_in

MIB = 1 << 20
STEADY = Reading(step=0, memory=100 * MIB, resident=300 * MIB, files=20, sockets=4, threads=8)

linux = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")


@linux
def test_a_reading_has_memory_files_sockets_and_threads() -> None:
    code = (
        "import socket, sys, threading\n"
        "held = bytearray(b'x') * (64 << 20)\n"
        "opened = [open('/dev/null') for _ in range(3)], [socket.socket() for _ in range(2)]\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print('up', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        seen = reading_of(psutil.Process(child.pid), step=7)
        child.communicate()
    assert seen.step == 7
    assert 64 * MIB < seen.memory < seen.resident < 128 * MIB
    assert (seen.files, seen.sockets, seen.threads) == (8, 2, 2)


@linux
def test_a_job_and_what_it_starts_are_watched_to_their_end(tmp_path: Path) -> None:
    child, job = tmp_path / "lifeline.py", tmp_path / "job.py"
    child.write_text("import time; time.sleep(1.5)")
    job.write_text(f"import subprocess, sys; subprocess.run([sys.executable, {str(child)!r}])")
    counted = iter(range(100))
    readings = dict(watch([sys.executable, str(job)], lambda: next(counted), lambda: None))
    assert [name for name in readings if name != "lifeline"] == [f"{sys.executable} {job}"[-40:]]
    assert [reading.step for reading in readings["lifeline"]] == sorted(
        reading.step for reading in readings["lifeline"]
    )


@linux
def test_a_job_that_fails_is_told() -> None:
    with pytest.raises(SystemExit, match="exit code 3"):
        watch([sys.executable, "-c", "raise SystemExit(3)"], lambda: 0, lambda: None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python -m moe_trm train config.yaml", "moe-trm train"),
        ("python -m launch.ranks 2 config.yaml", "torchrun"),
        ("python -u -m launch.train config.yaml", "learner rank"),
        ("python -m moe_trm.rollout.service", "rollout controller"),
        ("python -m sglang.launch_server --port 1", "SGLang server"),
        ("sglang::scheduler", "SGLang scheduler"),
        ("python -c from multiprocessing.resource_tracker import main;main(7)", "resource tracker"),
        ("", "unnamed"),
    ],
)
def test_processes_are_named_by_what_they_are(line: str, expected: str) -> None:
    assert role(line.split(" ")) == expected


def test_a_steady_process_is_flat() -> None:
    row = process_row("rank", [replace(STEADY, step=step) for step in range(101)], steps=100)
    assert row is not None
    assert row == {
        "process": "rank",
        "MiB": 100.0,
        "growth": "0.000 ± 0.000",
        "late growth": "0.000 ± 0.000",
        "RSS MiB": 300.0,
        "files": "20",
        "sockets": "4",
        "threads": "8",
        "verdict": "flat",
    }


@pytest.mark.parametrize("handle", ["files", "sockets", "threads"])
def test_handles_that_are_not_given_back_are_told(handle: str) -> None:
    readings = [replace(STEADY, step=step, **{handle: step // 10}) for step in range(101)]
    row = process_row("rank", readings, steps=100)
    assert row is not None
    assert (row[handle], row["verdict"]) == ("8 +5", "flat, handles")


def test_memory_that_grows_is_told() -> None:
    row = process_row("rank", [replace(STEADY, step=step, memory=step * 100_000) for step in range(101)], steps=100)
    assert row is not None
    assert row["verdict"] == "grows"
    assert row["growth"] == "9.537 ± 0.000"


def test_a_process_that_did_not_live_through_the_run_has_no_row() -> None:
    assert process_row("lifeline", [replace(STEADY, step=step) for step in range(60)], steps=100) is None


def test_logs_are_no_state(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "rollout.log", "report.html", "transcripts/step-1.txt", "checkpoints/step-1/a.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1234")
    kept = Kept()
    for step in range(101):
        kept.add(step, state_files(tmp_path))
    assert kept.readings[0] == (0, 4, 1)
    row = place_row("run", kept, 100)
    assert row is not None
    assert (row["files"], row["verdict"]) == ("1", "flat")


def test_steps_are_whole_lines_after_the_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert steps_in(path) == 0
    path.write_text('{"step": 0}\n{"step": 1}\n{"ste')
    assert steps_in(path) == 1
