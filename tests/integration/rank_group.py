"""The ranks of a test as forks: `python -m tests.integration.rank_group NUM_RANKS PATIENCE_S FOLDER PROGRAM...`.

Run by the rank server (`tests.integration.ranks`). `FOLDER` gets the output of each rank, and `statuses`: their exit
statuses as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_trm.learner.megatron import cpu_shim
from moe_trm.runtime.forked_ranks import run_ranks
from moe_trm.runtime.gloo import share_gloo_device


def main(arguments: Sequence[str]) -> None:
    num_ranks, patience_s, folder, *program = arguments
    # Most programs of tests build a learner from its parts.
    cpu_shim.install()
    faulthandler.enable(2)
    share_gloo_device()
    ended = run_ranks(program, int(num_ranks), patience_s=float(patience_s), asks=False, folder=Path(folder))
    (Path(folder) / "statuses").write_text(json.dumps([ended[rank] for rank in sorted(ended)]))


if __name__ == "__main__":
    main(sys.argv[1:])
