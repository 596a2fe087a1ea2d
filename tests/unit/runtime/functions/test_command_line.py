"""Command lines as processes of their own: whatever they do, they end in time, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from moe_trm.runtime import children
from moe_trm.runtime.functions.command_line import run_command
from moe_trm.runtime.functions.process import FunctionFailed
from moe_trm.runtime.lifeline import marked

PYTHON = [sys.executable, "-S", "-c"]


def nothing_is_left(mark: str) -> None:
    """A process that was ended by force may be there for another moment."""
    until = time.monotonic() + 100
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.02)
    assert marked(mark) == []


def run(
    code: str, folder: Path, *, limit_s: float = 60.0, most: int = 1 << 20, program: list[str] | None = None
) -> str:
    """Run Python code as a command; `reason: text` of its failure, or empty."""
    mark = f"TEST_MARK={folder}"
    environment = {"TEST_MARK": str(folder), "FOLDER": str(folder), "PATH": os.environ["PATH"]}

    async def go() -> str:
        try:
            await run_command(
                [*(program or PYTHON), code], environment, mark=mark, limit_s=limit_s, max_output_bytes=most
            )
        except FunctionFailed as failure:
            return f"{failure.reason}: {failure.what}"
        return ""

    said = asyncio.run(asyncio.wait_for(go(), 300))
    nothing_is_left(mark)
    return said


def test_a_command_that_ends_well(tmp_path: Path) -> None:
    assert run("import os; print('words'); open(os.environ['FOLDER'] + '/made', 'w')", tmp_path) == ""
    assert (tmp_path / "made").exists()


def test_its_exit_status_and_last_words_are_told(tmp_path: Path) -> None:
    code = "import sys; print('x' * 9000); print('no such tool: 漢字', file=sys.stderr); sys.exit(3)"
    said = run(code.replace("漢字", "\\u6f22"), tmp_path, program=[sys.executable, "-X", "utf8", "-c"])
    assert said.startswith("error: exit status 3; its last words: xxx")
    assert said.endswith("no such tool: 漢")
    assert len(said) < 2500
    assert run("import sys; sys.exit(1)", tmp_path) == "error: exit status 1; it printed nothing"


def test_a_signal_and_a_program_that_is_not_there_are_crashes(tmp_path: Path) -> None:
    said = run("import os, signal; print('oh', flush=True); os.kill(os.getpid(), signal.SIGSEGV)", tmp_path)
    assert said == "crash: ended by SIGSEGV; its last words: oh"
    said = run("", tmp_path, program=[str(tmp_path / "nothing")])
    assert said.startswith("crash: it cannot be started:")
    script = tmp_path / "script"
    script.write_text("no program\n")
    script.chmod(0o700)
    assert run("", tmp_path, program=[str(script)]).startswith("crash: it cannot be started:")


def test_a_command_that_takes_too_long(tmp_path: Path) -> None:
    assert run("import time; time.sleep(1000)", tmp_path, limit_s=0.2) == (
        "timeout: nothing within 0.2 s; it printed nothing"
    )


def given_up(code: str, folder: Path) -> None:
    """Run a command until it has made the file `begun`, and give it up."""
    mark = f"TEST_MARK={folder}"

    async def go() -> None:
        running = asyncio.ensure_future(
            run_command(
                [*PYTHON, code],
                {"TEST_MARK": str(folder), "FOLDER": str(folder)},
                mark=mark,
                limit_s=1000.0,
                max_output_bytes=1000,
            )
        )
        while not (folder / "begun").exists() and not running.done():
            await asyncio.sleep(0.02)
        assert marked(mark)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(asyncio.wait_for(go(), 300))
    nothing_is_left(mark)


@pytest.mark.parametrize("detached", [False, True])
def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path, detached: bool) -> None:
    """None of them minds SIGTERM, and one may leave the process group."""
    given_up(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n" + ("    os.setsid()\n" if detached else "") + "    if os.fork() == 0:\n"
        "        open(os.environ['FOLDER'] + '/begun', 'w')\n"
        "while True: time.sleep(1)\n",
        tmp_path,
    )


def test_a_command_that_is_asked_to_end_can_tidy_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "STOP_S", 200.0)
    given_up(
        "import os, signal, sys, time\n"
        "def leave(*_):\n"
        "    open(os.environ['FOLDER'] + '/tidy', 'w')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "open(os.environ['FOLDER'] + '/begun', 'w')\n"
        "while True: time.sleep(1)\n",
        tmp_path,
    )
    assert (tmp_path / "tidy").exists()


def test_children_that_outlive_a_command_are_ended_and_hold_nothing_up(tmp_path: Path) -> None:
    """They have its output open."""
    assert run("import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nprint('done')", tmp_path) == ""


def test_a_flood_of_output_ends_a_command_before_its_time(tmp_path: Path) -> None:
    code = "import os\nwhile True: os.write(1, b'never the same words ' * 4000)"
    said = run(code, tmp_path, limit_s=250.0, most=200_000)
    assert said.startswith("output: more than 200000 bytes of output; its last words:")
    assert len(said) < 2200


def test_nothing_else_is_ended(tmp_path: Path) -> None:
    """A process beside, with another mark."""

    async def go() -> int | None:
        beside = await asyncio.create_subprocess_exec(
            *PYTHON, "import time; time.sleep(1000)", env={"TEST_MARK": f"{tmp_path}/longer"}, start_new_session=True
        )
        try:
            await run_command(
                [*PYTHON, ""],
                {"TEST_MARK": str(tmp_path)},
                mark=f"TEST_MARK={tmp_path}",
                limit_s=60.0,
                max_output_bytes=1000,
            )
            return beside.returncode
        finally:
            os.killpg(beside.pid, signal.SIGKILL)
            await beside.wait()

    assert asyncio.run(go()) is None
