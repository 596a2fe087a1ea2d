"""A fork server without imports: `python -m tests.unit.runtime.light_server DESCRIPTOR`."""

from __future__ import annotations

import socket
import sys

from moe_trm.runtime.fork_server import serve

if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        serve(listener, sys.stdin.fileno())
