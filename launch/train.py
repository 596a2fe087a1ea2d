"""The learner: `torchrun --nproc-per-node N -m launch.train CONFIG [key=value ...]`.

Each rank builds its part of the model. The first rank of the node also starts the rollout controller. The controller
talks to the server that `python -m launch.rollout CONFIG` started, or to `rollout.url`. `moe-trm train CONFIG` starts
both.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal

from moe_trm.runtime.ending import run_to_end
from moe_trm.runtime.interruption import ASKED
from moe_trm.runtime.lifeline import end_with_parent
from moe_trm.runtime.output import outliving_readers


def main(argv: list[str] | None = None) -> int:
    """One rank, from its first instruction; its exit status."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m launch.train", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("config", help="YAML configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides such as replay.mode=R3")
    parser.add_argument("--restarted", action="store_true", help="these ranks replace some that died")
    parser.add_argument("--store", metavar="FILE", help="where ranks of one machine meet (default: torchrun's store)")
    args = parser.parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    faulthandler.enable(2)  # a crash of machine code tells where each thread was
    # While it imports there is nothing to save: Ctrl-C and SIGTERM end it at once, also those that came before.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED)
    from launch.learner import learn  # torch and Megatron-Core, which take seconds

    with outliving_readers():
        return learn(args.config, args.overrides, store=args.store, restarted=args.restarted)


if __name__ == "__main__":
    run_to_end(main)
