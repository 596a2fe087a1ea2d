"""Costs of recording, replay, proof and correction together, in each process of the quickstart.

`python -m benchmarks.costs_by_process --checkpoint DIR [--jobs 6] [--rounds 20] [--json FILE]` compares six jobs with
everything on with six that have nothing of it, as `benchmarks.costs` does with one of each: all are alive at once and
take turns step by step. Equal jobs differ by one or two hundredths as long as they live, which no number of turns
averages out. So there are several of each kind, and the intervals are those of the scatter among them
(`benchmarks.turn_ratios.ratio_of_kinds`). Settings, and what "nothing" leaves out, are those of `benchmarks.costs`. On
an idle machine it takes six minutes, and the jobs hold 14 GB together. `--hidden 256` measures a new, larger model in
place of a checkpoint (`benchmarks.start_model`): four jobs of each kind hold as much.

Rows: seconds of the step, CPU seconds of all processes, and those of the rollout server, of the controller and of all
learner ranks. In milliseconds a step: what it takes with nothing on, and how much more with everything, with its 95%
interval. `share` is that of the step with everything, as in the other benchmark.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.costs import EVERYTHING, WHOLE, measured, measured_of
from benchmarks.in_turn import Rounds, Turn, ending_all, turns_of
from benchmarks.options import command_line
from benchmarks.start_model import add_options, check, checkpoint_of, size_of
from benchmarks.table import Row, report
from benchmarks.turn_ratios import ratio_of_kinds

CONTROLLER, RANKS = "moe_trm.rollout.service", "launch."
"""Words of the command lines of these processes."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    add_options(parser)
    parser.add_argument("--jobs", type=int, default=6, help="of each kind (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of a step of each job (default: %(default)s)")
    args = parser.parse_args(argv)
    check(parser, args)
    if args.jobs < 2:
        parser.error("--jobs: two of each kind at least, whose scatter makes the intervals")
    kinds = kinds_of(args.jobs)
    with ending_all(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = checkpoint_of(args, folder / "model")
        size = size_of(checkpoint)
        found = list(measured(folder, checkpoint, kinds, args.rounds))
    title = f"Costs of everything by process, from {args.rounds} rounds in turn: {size}"
    report(title, list(rows(found, kinds)), args.json, {"turns": turns_of(found)})
    return 0


def kinds_of(jobs: int) -> dict[str, str]:
    """By job, what it is without: `jobs` of each kind."""
    return {f"{kind} {number}": kind for kind in (WHOLE, EVERYTHING) for number in range(jobs)}


def rows(found: Rounds, kinds: Mapping[str, str]) -> Iterator[Row]:
    """One for the step, one for its CPU time, and one for each kind of process."""
    values: dict[str, Callable[[Turn], float]] = {
        "step": lambda turn: turn.seconds,
        "CPU": lambda turn: turn.cpu_seconds,
        "CPU of the server": lambda turn: by_kind(turn)["server"],
        "CPU of the controller": lambda turn: by_kind(turn)["controller"],
        "CPU of the ranks": lambda turn: by_kind(turn)["ranks"],
    }
    for what, value in values.items():
        without = [value(turn) for made in found for name, turn in made if kinds[name] == EVERYTHING]
        nothing = 1000 * statistics.median(without)
        ratio = ratio_of_kinds(measured_of(found, value), kinds, WHOLE, EVERYTHING)
        low, high = ratio.interval
        yield {
            "of a step": what,
            "ms without": nothing,
            "more ms": nothing * (ratio.value - 1),
            "from": nothing * (low - 1),
            "to": nothing * (high - 1),
            "share": 1 - 1 / ratio.value,
            "share from": 1 - 1 / low,
            "share to": 1 - 1 / high,
        }


def by_kind(turn: Turn) -> dict[str, float]:
    """CPU seconds of a turn by kind of process. What is neither controller nor rank belongs to the server."""
    found = {"server": 0.0, "controller": 0.0, "ranks": 0.0}
    for command, seconds in turn.cpu_of.items():
        kind = "controller" if CONTROLLER in command else "ranks" if RANKS in command else "server"
        found[kind] += seconds
    return found


if __name__ == "__main__":
    sys.exit(main())
