"""The least that has to be done with recorded answers, in a process that has nothing of the intake.

`python -m benchmarks.plain_intake ANSWERS URL...`, started by `benchmarks.intake_processes`. What two of these gain
over one is what the machine lets two processes gain, with the servers on the same processors. Each body is received
with blocking calls into memory that is used again. Its routes are found, decoded from base64 and narrowed to one byte
per expert. Nothing is checked, bound or kept.
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import numpy as np
from pybase64 import b64decode

AHEAD = 3
"""Requests that are open at once, as an intake process has them: an answer waits while another is read."""
_REQUEST = b'POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 19\r\n\r\n{"input_ids":[0,1]}'
_KEY = b'"routed_experts":"'
_PART = 1 << 22


def main(answers: int, urls: Sequence[str]) -> int:
    """Receive and decode once whoever started it has said so.

    Prints the processor seconds, and when it began and ended.
    """
    size, memory = 0, bytearray(0)
    print("ready", flush=True)
    sys.stdin.readline()
    before, began = time.process_time(), time.monotonic()
    for connection in connections(answers, urls):
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(1 << 11)
            head, _, rest = head.partition(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            size = int(fields[b"content-length"])
            memory = memory if len(memory) >= size else bytearray(size)
            memory[: len(rest)] = rest
            body = memoryview(memory)[:size]
            done = len(rest)
            while done < size:
                done += connection.recv_into(body[done:], 0, socket.MSG_WAITALL)
        start = memory.find(_KEY) + len(_KEY)
        payload = body[start : memory.find(b'"', start)]
        experts = np.empty(len(payload) // 16 * 3 + 3, np.uint8)
        for start in range(0, len(payload), _PART):
            part = np.frombuffer(b64decode(payload[start : start + _PART], validate=True), "<i4")
            experts[start // 16 * 3 :][: len(part)] = part
    print(time.process_time() - before, began, time.monotonic())
    return 0


def connections(answers: int, urls: Sequence[str]) -> Iterator[socket.socket]:
    """One for each answer, asked `AHEAD` before it is read."""
    asked = deque[socket.socket]()
    for url in itertools.islice(itertools.cycle(urls), answers):
        parts = urlsplit(url)
        asked.append(socket.create_connection((parts.hostname, parts.port)))
        asked[-1].sendall(_REQUEST)
        if len(asked) == AHEAD:
            yield asked.popleft()
    yield from asked


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
