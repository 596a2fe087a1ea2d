"""The version of this package, and the commit of the checkout that it is in."""

from __future__ import annotations

import subprocess
from pathlib import Path

from moe_trm import __version__


def code_version() -> str:
    """For example `moe-trm 0.1.0 at 3822b73`, or `...-dirty` with uncommitted changes; no commit when installed."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return f"moe-trm {__version__}"
    asked = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return f"moe-trm {__version__}"
    return f"moe-trm {__version__} at {done.stdout.strip()}" if done.returncode == 0 else f"moe-trm {__version__}"
