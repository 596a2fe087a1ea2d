"""Start a rollout server and keep it until interrupted: `python -m launch.rollout CONFIG [key=value ...]`."""

from __future__ import annotations

import argparse
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from launch.start.places import check_folders, check_server
from moe_trm.config import load
from moe_trm.errors import MoeTrmError, refuse_together
from moe_trm.rollout.credentials import API_KEY_VARIABLE, api_key_for
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.watchdog import Watchdog
from moe_trm.runtime.addresses import is_loopback


class Interrupted(BaseException):
    """SIGTERM or SIGINT arrived."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT (exit status 0) or until the server fails for good (1)."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.rollout",
        description="Start the rollout server of a configuration and keep it until interrupted.",
        epilog=f"The server's key is that of {API_KEY_VARIABLE}, or a new one, which is printed. "
        "The learner: torchrun ... -m launch.train",
    )
    parser.add_argument("config", help="YAML configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. rollout.server.port=30200")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        return _serve(args.config, args.overrides)
    except Interrupted:
        return 0
    except MoeTrmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _serve(path: str, overrides: Sequence[str]) -> int:
    config = load(path, overrides)
    refuse_together(
        lambda: check_server(config.rollout),
        lambda: check_folders(config.checkpoint, config.record, config.sync, config.name, config.run_dir),
    )
    known_key = api_key_for(config.rollout)
    key = known_key or secrets.token_urlsafe(24)
    log_path = Path(config.run_dir) / config.name / log_name(config.rollout.server.host)
    print(f"starting the rollout server (log: {log_path})", flush=True)
    with Watchdog(Served.of(config), log_path, key) as watchdog:
        print(f"rollout server ready at {watchdog.url}", flush=True)
        if known_key is None:
            print(f"the trainer needs its key: export {API_KEY_VARIABLE}={key}", flush=True)
        watchdog.wait()
    return 0


def log_name(host: str) -> str:
    """The file name of the log of a server bound to `host`.

    Servers that other machines reach may write into a common run folder, so each has a log of its own.
    """
    return "rollout.log" if is_loopback(host) else f"rollout-{socket.gethostname()}.log"


if __name__ == "__main__":
    sys.exit(main())
