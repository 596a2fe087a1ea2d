"""Options of the quickstart's command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

BACKENDS = {"megatron": (), "deepspeed": ("learner.backend=deepspeed", "learner.parallel.expert=1")}
"""Additional settings of each learner."""
WHAT = "Warm a tiny Mixture-of-Experts model up to do sums badly, and let it learn by RL to show its working."


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; ends this process where they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m moe_trm.tools.quickstart", description=WHAT)
    parser.add_argument(
        "--config", default="configs/quickstart.yaml", help="YAML configuration (default: configs/quickstart.yaml)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="RL seeds to run (default: 0)")
    parser.add_argument("--controls", action="store_true", help="also run learning rate 0 and shuffled rewards")
    parser.add_argument(
        "--backend", choices=sorted(BACKENDS), default="megatron", help="the learner (default: megatron)"
    )
    parser.add_argument("--run-dir", type=Path, default="runs", help="where run directories go (default: runs)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further overrides such as train.steps=10")
    return parser.parse_args(arguments)
