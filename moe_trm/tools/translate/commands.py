"""`moe-trm config`: its own subcommands, and the translations from other frameworks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_trm.config import commands as own
from moe_trm.tools.translate import (
    from_areal,
    from_miles,
    from_nemo_rl,
    from_prime_rl,
    from_skyrl,
    from_slime,
    from_trl,
    from_verl,
)

_TRANSLATORS = {
    "verl": from_verl,
    "slime": from_slime,
    "miles": from_miles,
    "trl": from_trl,
    "nemo-rl": from_nemo_rl,
    "skyrl": from_skyrl,
    "prime-rl": from_prime_rl,
    "areal": from_areal,
}
_TAKES = {
    "verl": "Hydra's composed YAML, a list of key=value, or a launch script",
    "slime": "list of --flags or launch script",
    "miles": "list of --flags, launch script, or Python launcher",
    "trl": "YAML file of `trl grpo --config`, or list of --flags",
    "nemo-rl": "YAML file, beside the files that its defaults name",
    "skyrl": "launch script, or a list of key=value",
    "prime-rl": "TOML file of the rl command",
    "areal": "YAML file",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `moe-trm config` and its subcommands."""
    commands = own.configure(parser)
    for name, takes in _TAKES.items():
        foreign = commands.add_parser(
            f"from-{name}", help=f"translate {name} settings, and list what has no equivalent"
        )
        foreign.add_argument(
            "--accept-unknown", action="store_true", help="list settings that this translation does not know, and go on"
        )
        foreign.add_argument("file", help=f"{name}'s {takes}; -: standard input")
        foreign.add_argument("words", nargs=argparse.REMAINDER, help="further settings as on its command line")
        foreign.set_defaults(foreign=name)


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand. `diff` answers 1 when something differs, like diff(1)."""
    if args.config_command.startswith("from-"):
        return _translate(args.foreign, Path(args.file), args.words, accept_unknown=args.accept_unknown)
    return own.run(args)


def _translate(framework: str, path: Path, words: list[str], *, accept_unknown: bool) -> int:
    """The configuration on standard output, to-dos and failing checks on standard error.

    Returns 3 when a setting is unknown to the translation and that is not accepted; else 1 when somebody has to decide
    something, or when a run would be refused.
    """
    # The checks import the engines' side; `config show` does without.
    from moe_trm.tools.translate.checks import failing

    draft = _TRANSLATORS[framework](path, words)
    if accept_unknown:
        draft.accept_unknown()
    text = draft.yaml(f"Translated from {framework}: {path.name}\n{draft.counts()}")
    print(text, end="")
    print(draft.summary(), file=sys.stderr)
    refused = failing(text)
    for line in refused:
        print(f"refused by {line}", file=sys.stderr)
    return 3 if draft.unknown else 1 if refused or draft.to_do else 0
