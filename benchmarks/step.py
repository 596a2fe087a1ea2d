"""Seconds of a training step beside a peer's on the same machine.

`python -m benchmarks.step --checkpoint DIR --against trl [--python P] [--rounds N] [--steps N] [--json FILE]` trains
short runs of ours and of TRL in turn (`benchmarks.peers.against_trl`). `--python` names an interpreter that has `trl`
(`pip install trl==1.16.0`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import command_line
from benchmarks.peers.against_trl import against_trl
from benchmarks.table import report


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", required=True, help="Hugging Face folder, e.g. runs/quickstart-start")
    parser.add_argument("--against", choices=["trl"], default="trl", help="the peer (default: trl)")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with `trl` (default: this one)")
    parser.add_argument("--rounds", type=int, default=5, help="of three runs (default: 5)")
    parser.add_argument("--steps", type=int, default=16, help="of each run (default: 16)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows, runs = against_trl(args.checkpoint, Path(folder), args.python, args.rounds, args.steps)
    report("Seconds of a step, ours and TRL's, from runs in turn", rows, args.json, {"runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
