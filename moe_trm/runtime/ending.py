"""The end of a process that has imported much."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def run_to_end(main: Callable[[], int]) -> NoReturn:
    """Run `main` and end this process with its status, as at the end of a program, but without freeing its modules.

    With torch and Megatron-Core, Python takes more than a second of the processor for that. On a busy machine these
    are many seconds in which no thread runs and no signal is heard, and the launcher kills the rank.
    """
    status = 1
    try:
        status = main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - there is nobody above to tell it
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(status)
