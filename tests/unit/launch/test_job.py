"""`moe-trm train` before there is a learner."""

from __future__ import annotations

from tests.unit.launch.interrupted import assert_ends_silently

PROGRAM = """
import sys, time
import launch.job
def starting(*args): print("starting", flush=True); time.sleep(60)
launch.job.run_job = starting
from moe_trm.cli import main
sys.exit(main(["train", "config.yaml"]))
"""


def test_ctrl_c_while_starting_ends_it_at_once_and_without_a_traceback() -> None:
    assert_ends_silently(PROGRAM, "starting")
