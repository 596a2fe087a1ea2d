"""The `moe-trm` command.

A subcommand's module is imported only when it is called, so that `moe-trm --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from moe_trm import __version__
from moe_trm.errors import MoeTrmError

INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Command:
    """A subcommand: its module has `configure(parser)` and `run(args) -> int`. `examples` are shown by its `--help`."""

    name: str
    module: str
    help: str
    examples: tuple[str, ...]


COMMANDS = (
    Command(
        "train",
        "launch.job",
        "start the rollout server and the learner on this host; given again, it goes on where it stopped",
        ("configs/quickstart.yaml", "configs/async.yaml --nproc-per-node 8 replay.mode=R3 optimizer.lr=3e-5"),
    ),
    Command(
        "config",
        "moe_trm.tools.translate.commands",
        "show, explain and compare configurations, and translate those of verl, slime and miles",
        (
            "show configs/kl.yaml kl.coef=0.01",
            "explain replay.mode",
            "diff configs/quickstart.yaml configs/async.yaml",
            "from-verl run_qwen3_moe.sh > mine.yaml",
        ),
    ),
    Command(
        "eval",
        "moe_trm.tools.evaluate.commands",
        "measure trained weights on held-out prompts, greedy and sampled, by a real server",
        (
            "runs/quickstart --samples 8",
            "runs/quickstart --step 40 --by learner",
            "MODEL_FOLDER --prompts held_out.jsonl task.reward=my_task.py:reward",
        ),
    ),
    Command(
        "export",
        "moe_trm.tools.export.commands",
        "write a checkpoint of a run as a Hugging Face folder, which other programs load",
        ("runs/quickstart", "runs/quickstart --step 40 --out model", "runs/quickstart/checkpoints/step-000040"),
    ),
    Command(
        "report",
        "moe_trm.observe.report.commands",
        "write a run's HTML report, or that of two runs side by side",
        ("runs/quickstart", "runs/quickstart runs/async --out compared.html"),
    ),
    Command(
        "experiment",
        "moe_trm.tools.experiment.commands",
        "run arms x seeds from one file and compare them; given again, it goes on where it stopped",
        ("examples/experiments/replay_modes.yaml --dry-run", "examples/experiments/replay_modes.yaml --jobs 2"),
    ),
    Command(
        "doctor",
        "moe_trm.tools.doctor.commands",
        "say whether a configuration will work here, and what sets its two engines apart; trains nothing",
        ("configs/quickstart.yaml", "configs/gsm8k.yaml --no-probe", "configs/quickstart.yaml --json checks.json"),
    ),
    Command(
        "audit",
        "moe_trm.tools.audit.commands",
        "say from a dump of anybody's run what sets its rollout, its trainer and its checkpoint apart",
        (
            "rollout_3.pt train_3.pt --checkpoint MODEL_FOLDER --temperature 1",
            "dump.jsonl --checkpoint MODEL_FOLDER --json audit.json",
            "runs/bundle --checkpoint MODEL_FOLDER --rows 16",
        ),
    ),
    Command(
        "plan",
        "moe_trm.tools.plan.commands",
        "say what a run needs of which GPUs, and how long its steps take; reads config.json alone",
        (
            "configs/qwen3_30b_a3b_4_nodes.yaml --nodes 4 --gpus 8 --hf-config qwen3_30b_a3b",
            "configs/glm_4_5_air.yaml --nodes 5 --gpu h200 --hf-config glm_4_5_air --json plan.json",
        ),
    ),
    Command(
        "whatif",
        "moe_trm.tools.whatif.commands",
        "say what other corrections and losses would have kept of a recorded run; needs no engine",
        (
            "runs/bundle",
            "runs/bundle --rules '[{name: icepop}]' --loss gspo cispo --json whatif.json",
            "runs/quickstart --sweep trm_max.max_kl=1e-4:1",
        ),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status, 2 after a typed error (told on stderr).

    A reader that wants no more output, such as `head`, ends it quietly, and Ctrl-C with one line.
    """
    with ending_at_once():
        args = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # What is still buffered would be written at exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except MoeTrmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 128 + signal.SIGINT


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Inside the `with`, Ctrl-C ends the process from within its handler.

    While a module is imported there is nothing to clean up, and some code swallows what a handler raises.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        os.write(2, f"{INTERRUPTED}\n".encode())
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments of the chosen subcommand, with its `run`.

    Exits, as argparse does, after `--help` and on a wrong command line.
    """
    parser = argparse.ArgumentParser(
        prog="moe-trm",
        description="Record, replay, split and correct the mismatch between rollout and learner in RL of MoE models.",
        epilog="`moe-trm COMMAND --help` says more and gives examples.",
    )
    parser.add_argument("--version", action="version", version=f"moe-trm {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    subcommand = next((argument for argument in arguments if not argument.startswith("-")), None)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog="\n  ".join(["examples:", *(f"moe-trm {command.name} {example}" for example in command.examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command.name == subcommand:
            module = importlib.import_module(command.module)
            module.configure(subparser)
            subparser.set_defaults(run=module.run)
    args, late = parser.parse_known_args(arguments)
    # argparse takes positional words in one run only: `CONFIG --option 8 key=value` leaves the last one over.
    if late and (not hasattr(args, "overrides") or any(word.startswith("-") for word in late)):
        parser.error(f"unrecognized arguments: {' '.join(late)}")
    if late:
        args.overrides += late
    return args
