"""`moe-trm doctor CONFIG`: whether this run will work, before it is started; each line passes or says what to do.

`moe-trm doctor RUN --grown STEP STEP`: why the mismatch of a run grew between two of its checkpoints.

`moe-trm doctor CONFIG --layouts A B`: where two layouts of the learner differ, on recorded rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from launch.start.checks import Check
from launch.start.preflight import load_here, smallest_world
from moe_trm.config import load
from moe_trm.run_folder.growth import GROWTH_FILE
from moe_trm.runtime.private import Scratch
from moe_trm.tools.doctor.examine import Examination, examine
from moe_trm.tools.doctor.layout_comparison import compare_layouts
from moe_trm.tools.doctor.rehearsal import described
from moe_trm.tools.growth.examine import examine_growth

SIGNS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "skip": "-   "}


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm doctor`."""
    parser.add_argument("config", help="YAML configuration; with --grown the folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides such as replay.mode=R3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every check and figure here")
    parser.add_argument("--no-probe", action="store_true", help="a rehearsal: what needs neither engine nor GPU")
    parser.add_argument(
        "--bisect",
        action="store_true",
        help="in place of the probe, name the first layer and operation in which the two engines differ",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the probe's run and recording here")
    parser.add_argument(
        "--grown",
        type=int,
        nargs=2,
        metavar="STEP",
        help="of a run that recorded a bundle: why its mismatch grew between these two checkpoints",
    )
    parser.add_argument(
        "--layouts",
        nargs=2,
        metavar="WORDS",
        help="the first operation in which the learner differs between two layouts, each in quotes, such as "
        "'learner.parallel.expert=2' or 'learner.backend=deepspeed ranks=2'; rows are those of record.bundle",
    )
    parser.add_argument(
        "--rows", type=int, metavar="N", help="with --grown: texts of each step (32); with --layouts: rows (8)"
    )


def run(args: argparse.Namespace) -> int:
    """0 when nothing failed, 1 otherwise."""
    if args.grown is not None:
        return grown(args)
    if args.layouts is not None:
        return layouts(args)
    started, overrides, absent = time.perf_counter(), [*args.overrides], ""
    with Scratch() as scratch:
        checkpoint = load(args.config, overrides).model.checkpoint
        if args.no_probe and (release := described(checkpoint, scratch)):
            overrides, absent = [*overrides, f"model.checkpoint={release}"], checkpoint
        config, _ = load_here(args.config, overrides)
        folder = args.keep or scratch
        folder.mkdir(parents=True, exist_ok=True)
        examination = examine(
            args.config,
            overrides,
            config,
            smallest_world(config.learner.parallel),
            folder,
            tell,
            probe=not args.no_probe,
            bisecting=args.bisect,
            kept=args.keep is not None,
            absent=absent,
        )
    if examination.advice:
        print("\nrecommended:\n" + "\n".join(f"  {line}" for line in examination.advice))
    states = Counter(check.status for check in examination.checks)
    counts = f"{len(examination.checks)} checks, {states['fail']} failed, {states['skip']} not judged"
    print(f"\n{counts}, {time.perf_counter() - started:.0f} s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(as_data(examination), indent=2) + "\n", encoding="utf-8")
    return 0 if examination.healthy else 1


def grown(args: argparse.Namespace) -> int:
    """Print why the mismatch grew, and leave it in the run's folder for its report. 0: a cause is no failure."""
    with Scratch() as scratch:
        growth = examine_growth(Path(args.config), tuple(args.grown), args.rows or 32, scratch)
    for check in growth.checks:
        tell(check)
    text = json.dumps(asdict(growth), indent=2) + "\n"
    for path in (Path(args.config) / GROWTH_FILE, *([args.json] if args.json else [])):
        path.write_text(text, encoding="utf-8")
    return 0


def layouts(args: argparse.Namespace) -> int:
    """Print where two layouts differ. 0 when they agree, 1 otherwise."""
    with Scratch() as scratch:
        checks = compare_layouts(args.config, args.overrides, args.layouts, args.rows or 8, scratch, tell)
    healthy = all(check.status != "fail" for check in checks)
    if args.json:
        document = {"healthy": healthy, "layouts": args.layouts, "checks": [asdict(check) for check in checks]}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if healthy else 1


def tell(check: Check) -> None:
    """One check on the terminal."""
    body = check.says.replace("\n", "\n" + " " * 7)
    print(f"{SIGNS[check.status]}   {check.name}: {body}", flush=True)
    if check.fix and check.status in ("warn", "fail"):
        print(f"       do: {check.fix}", flush=True)


def as_data(examination: Examination) -> dict[str, object]:
    """Everything, for programs."""
    return {
        "healthy": examination.healthy,
        "checks": [asdict(check) for check in examination.checks],
        "cause": asdict(examination.finding) if examination.finding else None,
        "advice": examination.advice,
    }
