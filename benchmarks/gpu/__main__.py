"""Measurements that need a GPU: a whole run, the cost of replay and its proof, natural flips, pushes, lent memory.

`python -m benchmarks.gpu [--budget SECONDS] [--only NAME ...] [--list] [--folder DIR] [--device cpu]`. A stage that is
done is not done again. One that does not fit into the rest of the budget is not started, and the next call goes on with
it. Every stage leaves its result at once, in `results/NAME.json`, and its output in `logs/NAME.log`; `page.md` shows
all of them. Remove a result to measure again. `--device cpu` rehearses the stages on a small model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.page import page
from benchmarks.gpu.session import Session
from benchmarks.gpu.stages import stages


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every stage that has run ended well."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of this call (default: 600)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these stages alone")
    parser.add_argument("--list", action="store_true", help="name the stages and their longest seconds")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu"), help="of results (default: runs/gpu)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    chosen_stages = [stage for stage in stages(args.folder, args.device) if not args.only or stage.name in args.only]
    if args.list:
        print("\n".join(f"{stage.name:18} {stage.limit_s:5.0f} s  {stage.answers}" for stage in chosen_stages))
        return 0
    with Session(args.folder, args.budget, fused=find_spec("transformer_engine") is not None) as session:
        session.run(chosen_stages)
    results = session.results()
    (args.folder / "page.md").write_text(page(results, f"{datetime.now(UTC):%Y-%m-%d}"), encoding="utf-8")
    print(f"written: {args.folder / 'page.md'}")
    return int(any(result["status"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
