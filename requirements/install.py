"""Installs the pins of a requirements file into this interpreter's environment: `python requirements/install.py FILE`.

uv does in seconds what takes pip minutes. It is told to look where pip is told to look; what it cannot do, pip does.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
SAME_IN_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
"""pip's settings that uv knows under another name."""


def uv_settings(listed: str) -> dict[str, str]:
    """The environment in which uv looks where pip would; `listed` is what `pip config list` prints."""
    found = {}
    # Of two, the environment's is pip's.
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        if variable := SAME_IN_UV.get(name.rpartition(".")[2]):
            words = str(ast.literal_eval(value)).split()
            found[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(words)
    return found


def main(file: str) -> int:
    """Exit status of the installation."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
    # pip takes the best version of all indexes, uv by default those of the first that knows the name.
    environment = {"UV_INDEX_STRATEGY": "unsafe-best-match", **uv_settings(listed), **os.environ}
    found = subprocess.run(
        [*PIP, "install", "--quiet", "--constraint", file, "uv"], stderr=subprocess.DEVNULL, check=False
    )
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable, "--no-deps"]
    if found.returncode or subprocess.run([*command, "-r", file], env=environment, check=False).returncode:
        print("installing with pip, which takes some minutes", flush=True)
        return subprocess.run([*PIP, "install", "--quiet", "--no-deps", "-r", file], check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
