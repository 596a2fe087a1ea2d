"""`moe-trm doctor CONFIG`: whether this run will work, before it is started; each line passes or says what to do."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from launch.start.checks import Check
from launch.start.preflight import load_here, smallest_world
from moe_trm.config import load
from moe_trm.runtime.private import Scratch
from moe_trm.tools.doctor.examine import Examination, examine
from moe_trm.tools.doctor.rehearsal import described

SIGNS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "skip": "-   "}


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm doctor`."""
    parser.add_argument("config", help="YAML configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides such as replay.mode=R3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every check and figure here")
    parser.add_argument("--no-probe", action="store_true", help="a rehearsal: what needs neither engine nor GPU")
    parser.add_argument(
        "--bisect",
        action="store_true",
        help="in place of the probe, name the first layer and operation in which the two engines differ",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the probe's run and recording here")


def run(args: argparse.Namespace) -> int:
    """0 when nothing failed, 1 otherwise."""
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
    failed = sum(check.status == "fail" for check in examination.checks)
    print(f"\n{len(examination.checks)} checks, {failed} failed, {time.perf_counter() - started:.0f} s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(as_data(examination), indent=2) + "\n", encoding="utf-8")
    return 0 if examination.healthy else 1


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
