"""Runs every benchmark and writes the tables of benchmarks/RESULTS.md.

`python -m benchmarks.all [--only NAME ...] [--out FILE]`. Each benchmark is a process of its own and writes its rows as
JSON to `--rows`. Its table then replaces the block between `<!-- NAME -->` and `<!-- end NAME -->`. A missing block is
added at the end of the page; everything else on the page stays.

A benchmark that fails leaves its block as it was and is named at the end. Benchmarks of a trained model need `make
quickstart` first. `tests.drills.soak` and `tests.drills.resume_drill` take hours and are run separately.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import text_of

RESULTS = Path(__file__).parent / "RESULTS.md"


@dataclass(frozen=True)
class Benchmark:
    """One block of the page.

    Attributes:
        name: of the block and of the JSON file.
        title: heading of a block that is not on the page yet.
        module: under `benchmarks`; `arguments` follow it.
    """

    name: str
    title: str
    module: str
    arguments: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark("route_flip", "Route flips: SGLang in bfloat16 against Megatron-Core in float32", "route_flip"),
    Benchmark(
        "route_flip_olmoe",
        "Route flips: SGLang in bfloat16 against Hugging Face in float32, OLMoE with random weights",
        "route_flip",
        ("--family", "olmoe", "--b", "hf"),
    ),
    Benchmark("mask_rate", "What every rule and preset rejects", "mask_rate"),
    Benchmark("length_bias", "Who is rejected when nothing but noise separates the policies", "length_bias"),
    Benchmark("intake", "The intake of one long answer", "intake"),
    Benchmark("replay_overhead", "Replay and its proof", "replay_overhead"),
    Benchmark("packed_rows", "Packs against padded rows", "packed_rows"),
    Benchmark("route_store", "Routes at rest and on the wire", "route_store"),
    Benchmark("route_memory", "Memory of routes on their way", "route_memory"),
    Benchmark("weights", "Weights on their way to the engine", "weights"),
    Benchmark("push_changes", "Values that a step changes in a push", "push_changes"),
    Benchmark("use_proof", "Pushes proved by use", "use_proof"),
    Benchmark("exact", "Exact runs", "exact"),
    Benchmark("logprobs", "Log-probs without the vocabulary", "logprobs"),
    Benchmark("async_overlap", "Sampling beside training", "async_overlap"),
    Benchmark("plan_memory", "Memory that the planner predicts, and what torch allocates", "plan_memory"),
    Benchmark("plan_public", "Plans of real models, and what others report", "plan_public"),
    Benchmark("plan_seconds", "Steps that the planner predicts, and real ones", "plan_seconds"),
    Benchmark("planted_faults", "Planted faults and the causes that the doctor names", "planted_faults"),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all the requested benchmarks succeeded."""
    names = [bench.name for bench in BENCHMARKS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help=", ".join(names))
    parser.add_argument("--out", type=Path, default=RESULTS, help="the page (default: benchmarks/RESULTS.md)")
    parser.add_argument(
        "--rows", type=Path, default=Path("runs/benchmarks"), help="folder of the JSON files (default: runs/benchmarks)"
    )
    parser.add_argument("--render", action="store_true", help="only write the page anew from the JSON files")
    args = parser.parse_args(argv)
    args.rows.mkdir(parents=True, exist_ok=True)
    failed = []
    for bench in BENCHMARKS:
        if bench.name not in args.only:
            continue
        path = args.rows / f"{bench.name}.json"
        if not args.render:
            print(f"== {bench.name}", flush=True)
            command = [sys.executable, "-m", f"benchmarks.{bench.module}", *bench.arguments, "--json", str(path)]
            if subprocess.run(command, check=False).returncode:
                failed.append(bench.name)
                continue
        if path.is_file():
            page = args.out.read_text(encoding="utf-8") if args.out.is_file() else "# Results\n"
            args.out.write_text(replaced(page, bench, json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    if failed:
        print(f"failed, their blocks are as they were: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def replaced(page: str, benchmark: Benchmark, measured: Mapping[str, Any]) -> str:
    """The page with this benchmark's block made anew."""
    begin, end = f"<!-- {benchmark.name} -->", f"<!-- end {benchmark.name} -->"
    block = f"{begin}\n{rendered(measured)}\n{end}"
    if begin not in page:
        return f"{page.rstrip()}\n\n## {benchmark.title}\n{block}\n"
    head, rest = page.split(begin, 1)
    return head + block + rest.split(end, 1)[1]


def rendered(measured: Mapping[str, Any]) -> str:
    """Command, date and machine, then one Markdown table for each run of rows with the same columns."""
    command = re.sub(r" --(json|picture) \S+", "", measured["command"])
    machine = f"{measured['cores']} cores, {measured['cpu']}, Python {measured['python']}, torch {measured['torch']}"
    head = f"`{command}`, {measured['date'][:10]}, {machine}."
    head = textwrap.fill(head, 120, break_long_words=False, break_on_hyphens=False)
    lines = [head, "", "; ".join(measured["title"].splitlines())]
    for columns, rows in itertools.groupby(measured["rows"], key=list):
        lines += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(text_of(row[name]) for name in columns)} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
