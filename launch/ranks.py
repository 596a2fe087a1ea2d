"""torchrun for the ranks of this host, as `moe-trm train` uses it: a failed rank's own message is the last word, not torchrun's traceback.

`python -m launch.ranks NUM_RANKS CONFIG [key=value ...]` does what
`torchrun --standalone --nproc-per-node NUM_RANKS -m launch.train CONFIG [key=value ...]` does.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main(arguments: Sequence[str]) -> int:
    """Exit code of the rank that failed first, 0 when all succeeded."""
    num_ranks, *rest = arguments
    # The ranks say in plain words what went wrong; torchrun's own report of it would bury them.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(num_ranks),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "launch.train", *rest)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        print(f"learner rank {failure.local_rank} ended with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as signal:
        return 128 + signal.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
