"""One sample of a repair: the agent's command in a sandbox of its own; the reward is 1 if the test passes afterwards.

    python sample.py [--seconds S] [--memory-mib M] [--processes N] -- COMMAND

In the command, {task} is the text of the prompt and {here} the folder of this file. The agent's exit status is no part
of the reward: an agent that hangs or is killed has what its files are worth.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sandbox import Bounds, Repair, SandboxError, run

HANDED_IN = ("OPENAI_", "ANTHROPIC_")
"""Beginnings of the variables that the agent gets, beside `PATH` and `LANG`."""


def main(argv: Sequence[str] | None = None) -> int:
    """See the top of this file. 1: no reward could be had, and the sample is rejected."""
    parser = argparse.ArgumentParser(description="one sample of a repair, in a sandbox")
    parser.add_argument("--seconds", type=float, default=Bounds.seconds, help="of the agent (default: %(default)g)")
    parser.add_argument("--test-seconds", type=float, default=Bounds.test_seconds, help="(default: %(default)g)")
    parser.add_argument("--memory-mib", type=int, default=Bounds.memory_bytes >> 20, help="of a process")
    parser.add_argument("--processes", type=int, default=Bounds.num_processes, help="at the same time")
    parser.add_argument("command", nargs="+", help="the agent")
    args = parser.parse_args(argv)
    row = json.loads(Path(os.environ["MOE_TRM_PROMPT"]).read_bytes())
    repair = Repair(**{name: row["extra"][name] for name in ("files", "tests", "test")})
    bounds = Bounds(args.seconds, args.test_seconds, args.memory_mib << 20, num_processes=args.processes)
    here = str(Path(__file__).parent.resolve())
    command = [part.replace("{task}", row["text"]).replace("{here}", here) for part in args.command]
    environment = {name: value for name, value in os.environ.items() if name.startswith(HANDED_IN) or name == "PATH"}
    try:
        outcome = run(command, repair, environment | {"LANG": "C.UTF-8"}, os.environ["OPENAI_BASE_URL"], bounds)
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"agent: {outcome.agent}, test: {outcome.test}")
    Path(os.environ["MOE_TRM_REWARD"]).write_text(json.dumps(float(outcome.test == 0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
