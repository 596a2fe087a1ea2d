"""`python -m launch.forked NUM_RANKS CONFIG [key=value ...]`: as `launch.ranks`, with forks of itself as ranks.

For a process that has the ranks' imports done already (`launch.warm`); in any other one each rank does its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from launch.ranks import SHUTDOWN_PATIENCE_S, main
from moe_trm.runtime.forked_ranks import run_ranks


def as_forks(num_ranks: int, program: Sequence[str]) -> Mapping[int, int]:
    """The ranks as forks of this process."""
    ended = run_ranks(program, num_ranks, patience_s=SHUTDOWN_PATIENCE_S)
    return {rank: status for rank, status in ended.items() if status}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], as_forks))
