"""The quickstart: a tiny Mixture-of-Experts model, warmed up to do sums badly, learns by RL to show its working.

`python -m moe_trm.quickstart` runs one seed; `--seeds 0 1 2` several; `--controls` adds the two runs that must not
learn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from launch.warm import warm_server
from moe_trm.rollout.sglang.warm import warm_engine
from moe_trm.runtime.warm import WarmServer

BACKENDS = {"megatron": (), "deepspeed": ("learner.backend=deepspeed", "learner.parallel.expert=1")}
"""Additional settings of each learner."""
LOG = "quickstart-imports.log"
"""Output of the processes that import what learner ranks and rollout server need."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_trm.quickstart", description=__doc__)
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
    args = parser.parse_args(argv)
    args.run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        ranks, engine = (stack.enter_context(make(args.run_dir / LOG)) for make in (warm_server, warm_engine))
        warm: dict[str, WarmServer] = {"warm_engine": engine, **({"warm": ranks} if args.backend == "megatron" else {})}
        for server in warm.values():
            server.address()
        # The imports of this process take as long as those of the other ones, which have begun with them.
        from moe_trm.quickstart.trials import run, trials

        planned = trials(args.seeds, args.controls, args.backend)
        return run(planned, args.config, args.run_dir, [*BACKENDS[args.backend], *args.overrides], warm)


if __name__ == "__main__":
    sys.exit(main())
