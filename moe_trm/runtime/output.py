"""Standard output and errors of a training run, which goes on when their reader is gone."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Inside the `with`, what is printed goes nowhere once its reader is gone, such as `head`; nothing is raised."""
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(_lasting(sys.stdout)))
        stack.enter_context(redirect_stderr(_lasting(sys.stderr)))
        yield


class _Lasting(io.FileIO):
    """A descriptor that becomes the null device when its pipe breaks."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)  # type: ignore[arg-type]


def _lasting(stream: TextIO) -> TextIO:
    """A stream over the same descriptor; the stream itself where it has none."""
    try:
        raw = _Lasting(stream.fileno(), "w", closefd=False)
    except (OSError, ValueError):
        return stream
    stream.flush()
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)
