"""`moe-trm train` before there is a learner."""

from __future__ import annotations

import signal
import subprocess
import sys

PROGRAM = """
import sys, time
import launch.job
def starting(*args): print("starting", flush=True); time.sleep(60)
launch.job.run_job = starting
from moe_trm.cli import main
sys.exit(main(["train", "config.yaml"]))
"""


def test_ctrl_c_while_starting_ends_it_at_once_and_without_a_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "starting\n"
        job.send_signal(signal.SIGINT)
        _, told = job.communicate(timeout=30)
    assert job.returncode == 128 + signal.SIGINT
    assert told == ""
