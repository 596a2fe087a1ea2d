"""Ends the stopped processes of a benchmark that was killed: they cannot see that their owner is gone.

`python turn_guard.py` reads lines of process ids. Each line takes the place of the one before. When its input ends, it
kills the processes of the last line with SIGKILL; after an empty line there are none.
"""

import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    last = ""
    for line in sys.stdin:
        last = line
    for pid in map(int, last.split()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
