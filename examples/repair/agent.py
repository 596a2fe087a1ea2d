"""A small coding agent: the policy writes shell commands between ```sh and ```, and reads their output.

It needs Python alone, and ends with the first answer without a command.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from urllib.request import ProxyHandler, Request, build_opener

COMMAND = re.compile(r"```sh\n(.*?)```", re.DOTALL)
RULES = "Repair the files in this folder. Write one command between ```sh and ``` at a time, and nothing when done."
MAX_OUTPUT, COMMAND_S = 4000, 30


def answer(messages: list[dict[str, str]]) -> str:
    """The policy's next message."""
    request = Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with build_opener(ProxyHandler({})).open(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def shell(command: str) -> str:
    """The end of the output of a command, and its exit status. The command does not get the key of the session."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"ended after {COMMAND_S} s"
    except OSError as error:
        return f"cannot be started: {error}"
    return f"{done.stdout[-MAX_OUTPUT:].decode(errors='replace')}\nexit status {done.returncode}"


def main() -> None:
    """Talk until there is no command; the task is the first argument."""
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": sys.argv[1]}]
    while True:
        text = answer(messages)
        command = COMMAND.search(text)
        if command is None:
            return
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": shell(command[1])})


if __name__ == "__main__":
    main()
