"""Work in forks of this process, which begins with its imports done and with nothing else of it."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from moe_trm.errors import RunError
from moe_trm.runtime.lifeline import end_with_parent

_HANDLERS: dict[signal.Signals, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""Of a process that has just begun."""
_TASKS = Path("/proc/self/task")


def fork(work: Callable[[], int], *, deaf: bool = False) -> int:
    """Process id of a fork of this process that ends with the exit status of `work()`.

    It is killed when this process ends, and has a session of its own, with the signal handlers of a process that has
    just begun.

    Args:
        work: what the fork does; what it raises is told on standard error.
        deaf: SIGINT, SIGTERM and SIGHUP do not end it.
    Raises:
        RunError: this process has several threads. A fork has one, and the locks that the others hold stay shut.
    """
    check_one_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # A signal that comes before the fork has its own handlers would be taken by those of this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLERS)
    try:
        pid = os.fork()
        if pid == 0:
            _live(work, parent, before, deaf)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _live(work: Callable[[], int], parent: int, mask: set[int], deaf: bool) -> None:
    """The life of a fork; it does not return."""
    status = 1
    try:
        end_with_parent()
        if os.getppid() != parent:  # it ended before it could be watched
            os._exit(status)
        os.setsid()
        for number, handler in _HANDLERS.items():
            signal.signal(number, signal.SIG_IGN if deaf else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = work()
    except BaseException:  # noqa: BLE001 - told as the interpreter would have told it
        traceback.print_exc()
    finally:
        _leave(status)


def _leave(status: int) -> None:
    """End this fork without the teardown of all it inherited, which takes a second; its own exit handlers run."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF)


def check_one_thread() -> None:
    """Raise `RunError` where this process has several threads, counted by the system where it tells."""
    threads = len(list(_TASKS.iterdir())) if _TASKS.is_dir() else threading.active_count()
    if threads > 1:
        raise RunError(
            "a process with several threads cannot fork warm ranks",
            got=f"{threads} threads: {', '.join(thread.name for thread in threading.enumerate())}",
            expected="one thread",
            fix="Leave warm_ranks out. If nothing of your own is imported at start, please report this.",
        )


def run_program(program: Sequence[str]) -> int:
    """`python PROGRAM...` in this process, which takes that name in lists of processes; its exit status.

    Args:
        program: `-m`, a module and its arguments, or a script and its arguments.
    """
    _take_name(program)
    try:
        if program[0] == "-m":
            sys.argv = list(program[1:])
            sys.modules.pop(program[1], None)  # it is imported for what it imports, and begins anew
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(program)
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - told as the interpreter would have told it
        traceback.print_exc()
        return 1
    return 0


def _take_name(program: Sequence[str]) -> None:
    """Be called `python PROGRAM...`, where the package for it is installed."""
    with suppress(ImportError):
        from setproctitle import setproctitle

        before = os.environ.get("SPT_NOENV")
        os.environ["SPT_NOENV"] = "1"  # the name does not reach into what shows the environment
        setproctitle(" ".join([sys.executable, *program]))
        if before is None:
            del os.environ["SPT_NOENV"]
