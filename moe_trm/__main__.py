"""`python -m moe_trm` is `moe-trm`."""

from __future__ import annotations

import sys

from moe_trm.cli import main

if __name__ == "__main__":
    sys.exit(main())
