"""Costs of recording, replay, proof and correction of a step, by switching them off one by one.

`python -m benchmarks.costs --checkpoint DIR [--rounds 40] [--json FILE]` runs six jobs that are all alive at once: with
everything on, without each part, and without all of them. Each has its own server and ranks, and the settings of the
quickstart. They take turns step by step, and all but one are stopped meanwhile (`benchmarks.in_turn`). So steps that
are compared are seconds apart. A round has a turn of each job in random order, and two of the jobs with everything and
with nothing. The learning rate is 0, so that all sample from the same policy. On an idle machine it takes six minutes,
and the six jobs hold 7 GB together.

A turn has seconds, and CPU seconds of all processes (server, controller, ranks). How long answers are is chance, and
moves both by more than a part does. So does the host: how much of the turn it gave to other machines, and other
processes of this one. Logarithms of all turns together are therefore explained by robust least squares: what is
switched off, the round, and the logarithms of the mean and the longest answer and of both figures of the host
(`benchmarks.turn_ratios`). The estimator is Huber's: a few turns that something else has slowed down hardly count. The
95% intervals are Student's, and are those of turns: jobs with the same settings differ by one or two hundredths as long
as they live, which `benchmarks.costs_by_process` takes into account.

`--hidden 256 --layers 8 --experts 32 --top-k 4` measures a new model of that shape (`benchmarks.start_model`).

`sync.verify=false` leaves a push as it is and asks for no proof: the digests that ranks make of their tensors stay.
Probes are off in all jobs: what they cost is `probe.tokens`' choice.
Without masks the server draws tokens in the same way, from the same sorted weights, because the quickstart's vocabulary
is below the 4,096 ids that a mask may have; the learner scores over the vocabulary.

Without routes the server has no recorder of them. The router chooses as it does under replay: replay asks it for its
choice, too, to count flips, and skips nothing. The replayer stays attached with nothing to prove: its hooks and one
exchange of empty counts for each update are in all jobs. So are the metrics of mismatch, which `correction.rules=[]`
leaves as they are.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.in_turn import Rounds, Turn, ending_all, rounds_of, turns_of
from benchmarks.options import command_line
from benchmarks.own_arms import CONFIG, SKIPPED, own_arm, place_in
from benchmarks.start_model import add_options, check, checkpoint_of, size_of
from benchmarks.table import Row, report
from benchmarks.turn_ratios import Measured, Ratio, ratios
from moe_trm.config import load

WHOLE = "everything on"
EVERYTHING = "all of these"
WITHOUT: Mapping[str, tuple[str, ...]] = {
    WHOLE: (),
    "sampling masks": ("sampling_mask.mode=off",),
    "routes, their replay and its proof": ("replay.mode=none",),
    "correction": ("correction.rules=[]",),
    "proof of pushes": ("sync.verify=false",),
    EVERYTHING: ("sampling_mask.mode=off", "replay.mode=none", "correction.rules=[]", "sync.verify=false"),
}
"""Parts and the settings without them."""
OFTEN = {WHOLE: 2, EVERYTHING: 2}
"""Turns in a round: most of those that all others are compared with, and of the sum."""
SKIPPED_ROUNDS = 1
SETTINGS = (
    "optimizer.lr=0.0",
    "probe.every=0",
    "task.eval_size=0",
    "train.export=false",
    "checkpoint.every=0",
    "observe.report=false",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=40, help="of eight steps each (default: %(default)s)")
    args = parser.parse_args(argv)
    check(parser, args)
    with ending_all(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = checkpoint_of(args, folder / "model")
        size = size_of(checkpoint)
        found = list(measured(folder, checkpoint, {name: name for name in WITHOUT}, args.rounds, OFTEN))
    title = f"Costs of a step's parts, from {args.rounds} rounds of steps in turn: {size}"
    report(title, list(rows(found)), args.json, {"turns": turns_of(found)})
    return 0


def measured(
    folder: Path, checkpoint: str, jobs: Mapping[str, str], rounds: int, often: Mapping[str, int] | None = None
) -> Iterator[list[tuple[str, Turn]]]:
    """Round by round, the turns of all jobs, which live meanwhile.

    Args:
        folder: of their runs.
        checkpoint: that they start from.
        jobs: by name, what each is without (`WITHOUT`).
        rounds: how many are given.
        often: turns of a job in a round, where it is not 1.
    """
    turns = max((often or {}).values(), default=1) * (SKIPPED_ROUNDS + rounds)
    # The last step of a job is another one, and is never reached.
    settings = [*SETTINGS, f"model.checkpoint={checkpoint}", f"train.steps={SKIPPED + turns + 1}"]
    with ExitStack() as stack:
        place = stack.enter_context(place_in(folder))
        arms = {
            name: stack.enter_context(
                own_arm(place, name, [*settings, *WITHOUT[part]], records="replay.mode=none" not in WITHOUT[part])
            )
            for name, part in jobs.items()
        }
        yield from rounds_of(arms, rounds, often, SKIPPED_ROUNDS)


def measured_of(found: Rounds, value: Callable[[Turn], float]) -> list[Measured]:
    """`value` of every turn, with what chance has moved it by: lengths of answers, and the host."""
    return [
        Measured(
            name,
            number,
            value(turn),
            (*(turn.row[f"response/length_{which}"] for which in ("mean", "max")), *turn.host),
        )
        for number, made in enumerate(found)
        for name, turn in made
    ]


def shares(found: Rounds, value: Callable[[Turn], float]) -> dict[str, Ratio]:
    """By part, `1 - without / with` of `value`."""
    return {
        name: Ratio(1 - ratio.value, (1 - ratio.interval[1], 1 - ratio.interval[0]))
        for name, ratio in ratios(measured_of(found, value), WHOLE).items()
    }


def rows(found: Rounds) -> Iterator[Row]:
    """A row for each part, after one of the whole step."""
    of_step, of_cpu = shares(found, lambda turn: turn.seconds), shares(found, lambda turn: turn.cpu_seconds)
    rollout = load(CONFIG, ["model.checkpoint=unused"]).rollout
    answers = rollout.prompts_per_step * rollout.group_size
    for name in WITHOUT:
        own = [turn for made in found for arm, turn in made if arm == name]
        row: Row = {
            "without": "-" if name == WHOLE else name,
            "steps": len(own),
            "step s": statistics.median(turn.seconds for turn in own),
            "CPU s / 1,000 tokens": statistics.median(
                1000 * turn.cpu_seconds / (answers * turn.row["response/length_mean"]) for turn in own
            ),
        }
        if name != WHOLE:
            row |= _columns("step", of_step[name]) | _columns("CPU", of_cpu[name])
        yield row


def _columns(what: str, share: Ratio) -> Row:
    return {f"of the {what}": share.value, f"{what} from": share.interval[0], f"{what} to": share.interval[1]}


if __name__ == "__main__":
    sys.exit(main())
