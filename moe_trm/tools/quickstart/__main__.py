"""The quickstart: a tiny Mixture-of-Experts model, warmed up to do sums badly, learns by RL to show its working.

`python -m moe_trm.tools.quickstart` runs one seed; `--seeds 0 1 2` several; `--controls` adds the two runs that must
not learn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moe_trm.tools.quickstart.options import parse


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    from moe_trm.tools.quickstart.trials import run_trials  # imports torch, which takes seconds

    return run_trials(args)


if __name__ == "__main__":
    sys.exit(main())
