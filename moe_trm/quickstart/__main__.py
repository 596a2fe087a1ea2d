"""The quickstart: a tiny Mixture-of-Experts model, warmed up to do sums badly, learns by RL to show its working.

`python -m moe_trm.quickstart` runs one seed; `--seeds 0 1 2` several; `--controls` adds the two runs that must not
learn. This process imports nothing that takes long. Two others do so at the same time: one has SGLang, and forks the
rollout servers, one has all else, and forks the rest.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from launch.warm import warm_server
from moe_trm.errors import RunError
from moe_trm.quickstart.options import parse
from moe_trm.rollout.sglang.warm import warm_engine
from moe_trm.runtime.warm import WarmProcess

LOG = "quickstart-imports.log"
"""Output of the two processes."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    run_dir = parse(arguments).run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    with warm_server(run_dir / LOG) as ranks, warm_engine(run_dir / LOG) as engine:
        forks = [ranks.address(), engine.address()]
        try:
            trials = WarmProcess(forks[0], ["-m", "moe_trm.quickstart.trials", *forks, *arguments])
        except RunError:  # it could not do the imports, of which its log tells, or it may not fork
            from moe_trm.quickstart.trials import main as run

            return run(["", "", *arguments])
        with trials:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, _frame: trials.send_signal(number))
            status = trials.wait()
            return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
