"""Runs `argument_check` programs for `test_rehearsal.py`, each in a fork of this process, which imports SGLang once.

A line of standard input is the program and its arguments, as JSON. The answer on standard output is the exit code and
what the program printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback

with contextlib.suppress(ImportError):  # which each fork says again
    import sglang.srt.server_args  # noqa: F401 (the forks have it)


def judged(code: str, arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the program."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["-c", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException:  # noqa: BLE001 (argparse exits; SGLang raises whatever it likes)
            traceback.print_exc()
            return 1, out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints
    for line in sys.stdin:
        if not (child := os.fork()):
            code, arguments = json.loads(line)
            answers.write(json.dumps(judged(code, arguments)) + "\n")
            answers.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
