"""Gaps of the proof by use in clean runs, from which its bounds are made, and what the proof costs.

`python -m benchmarks.use_proof [--checkpoint DIR] [--steps N] [--json FILE]`

Short runs on real SGLang servers and Megatron-Core, one for each arithmetic of the engine. Every push is proved by use
(`sync.prove_every=1`), at a learning rate that moves the weights. Largest gaps over all pushes, medians of seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import command_line
from benchmarks.short_run import record_run, starting_checkpoint
from benchmarks.table import Row, report
from moe_trm.errors import MoeTrmError
from moe_trm.rollout.servers.use_proof import BOUNDS


def measured(checkpoint: Path, folder: Path, dtype: str, steps: int) -> Row:
    """The figures of one run."""
    folder.mkdir()
    settings = [f"rollout.server.dtype={dtype}", "sync.prove_every=1", "optimizer.lr=1e-3"]
    record_run(checkpoint, folder, steps, [*settings, "rollout.server.startup_timeout_s=1200"])
    lines = (folder / "runs" / "short-run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seen = [row for row in map(json.loads, lines) if "weights/decode_gap" in row]
    bounds, seconds = BOUNDS[dtype], [row["weights/proof_s"] for row in seen]
    step_s = statistics.median(row["time/step_s"] for row in seen)
    return {
        "engine": dtype,
        "pushes": len(seen),
        "decode gap": max(row["weights/decode_gap"] for row in seen),
        "its bound": bounds.decode,
        "learner gap": max(row["weights/learner_gap"] for row in seen),
        "bound of that": bounds.learner,
        "proof s": statistics.median(seconds),
        "step s": step_s,
        "share of a step, every 10th": statistics.median(seconds) / 10 / step_s,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder (default: the quickstart's)")
    parser.add_argument("--steps", type=int, default=8, help="of each run (default: 8)")
    parser.add_argument("--dtypes", nargs="+", choices=[*BOUNDS], default=[*BOUNDS], help="of the engine")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="moe-trm-use-") as scratch:
            checkpoint = starting_checkpoint(args.checkpoint, Path(scratch)).resolve()
            rows = [measured(checkpoint, Path(scratch) / dtype, dtype, args.steps) for dtype in args.dtypes]
    except MoeTrmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    report(f"Proof by use in clean runs of {args.steps} steps", rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
