"""The `moe-trm` command. A subcommand's module is imported only when it is called, so that `moe-trm --help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from moe_trm.errors import MoeTrmError


@dataclass(frozen=True)
class Command:
    """A subcommand: its module has `configure(parser)` and `run(args) -> int`."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("train", "launch.job", "start the rollout server and the learner on this host"),
    Command("config", "moe_trm.config.commands", "show, explain and compare configurations"),
    Command("report", "moe_trm.report.commands", "write a run's HTML report, or that of two runs side by side"),
    Command("doctor", "moe_trm.doctor.commands", "whether a configuration will work here, before it is started"),
    Command("whatif", "moe_trm.whatif.commands", "what other corrections and losses would have kept of a recorded run"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status, 2 after a typed error (told on stderr)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="moe-trm",
        description="Record, replay, split and correct the mismatch between rollout and learner in RL of MoE models.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if command.name == chosen:
            module = importlib.import_module(command.module)
            module.configure(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    try:
        return int(args.run(args))
    except MoeTrmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
