"""A policy at a terminal: a program of its own, started for every sample, with a shell for the policy.

    672+39=                                    the prompt
    2+9=   [11]   ,7+3+1=   [11]   ,6+0+1=   [7]   #711

What the policy writes up to `=` is a command of its terminal, and what stands in brackets is the shell's answer. The
program knows nothing of MoE-TRM: it finds the policy in the variables that OpenAI's client reads.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import time
from types import TracebackType
from typing import Self

COMMAND = re.compile(r"(\d+(?:[+-]\d+)+)$")
PROFILE = """
ulimit -t 5 -f 64
calc() {
    v=$(( $1 ))
    if [ "$v" -ge 0 ]; then echo "$v"; else echo "$(( (v % 10 + 10) % 10 ))b"; fi
}
"""
"""Limits of the shell, and its one command. A negative value is written the way the model borrows."""
ANSWER_S = 10.0


class Terminal:
    """A shell in a process of its own, which keeps its state from command to command.

    It gets an empty environment: commands of the policy must not read the key of its session, nor write its reward.
    """

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": os.defpath},
            cwd=os.environ.get("TMPDIR"),
            start_new_session=True,
        )
        self.run(PROFILE)

    def run(self, command: str) -> str:
        """The output of a command. Raises `TimeoutError`, and `EOFError` where the shell has ended."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        mark = os.urandom(8).hex()
        self._shell.stdin.write(f"{command}\necho {mark}\n".encode())
        self._shell.stdin.flush()
        output, until = b"", time.monotonic() + ANSWER_S
        while mark.encode() not in output:
            if not select.select([self._shell.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the terminal did not answer within {ANSWER_S:g} s")
            part = os.read(self._shell.stdout.fileno(), 4096)
            if not part:
                raise EOFError("the terminal was closed")
            output += part
        return output.partition(mark.encode())[0].decode(errors="replace").strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shell.kill()
        self._shell.communicate()


def main() -> None:
    """One sample. It leaves no reward, so `task.reward` judges the last answer."""
    from openai import OpenAI

    with open(os.environ["MOE_TRM_PROMPT"], encoding="utf-8") as file:
        text = json.load(file)["text"]
    client = OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
    with Terminal() as terminal:
        while True:
            choice = client.completions.create(model=os.environ["OPENAI_MODEL"], prompt=text, stop=["="]).choices[0]
            if (choice.model_extra or {}).get("matched_stop") != "=":
                return
            command = COMMAND.search(choice.text)
            text += f"{choice.text}={terminal.run(f'calc {command[1]}') if command else '?'}"


if __name__ == "__main__":
    main()
