"""A fork server without imports: `python -m tests.unit.runtime.light_server DESCRIPTOR`."""

from __future__ import annotations

import sys

from moe_trm.runtime.fork_server import live

if __name__ == "__main__":
    live(int(sys.argv[1]))
