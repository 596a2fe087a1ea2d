"""SGLang's router at the address of `rollout.router`: `python -m launch.router CONFIG [key=value ...]`.

It begins without servers: the controller of the run tells it which of `rollout.urls` may sample. Needs
`pip install 'moe-trm[router]'`. For other settings start `smg launch` by hand; the key of the servers is the key of the
router.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from urllib.parse import urlsplit

from moe_trm.config import load
from moe_trm.errors import ConfigError, MoeTrmError
from moe_trm.rollout.credentials import API_KEY_VARIABLE, api_key_for


def main(arguments: Sequence[str] | None = None) -> int:
    """Route until SIGTERM or SIGINT; exit status 1 with the reason where it cannot."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print("usage: python -m launch.router CONFIG [key=value ...]", file=sys.stderr)
        return 0 if words else 2
    try:
        _route(words[0], words[1:])
    except MoeTrmError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _route(path: str, overrides: Sequence[str]) -> None:
    config = load(path, overrides)
    address = urlsplit(config.rollout.router or "")
    if not address.hostname or not address.port:
        raise ConfigError(
            "no address for the router",
            where="config key rollout.router",
            got=config.rollout.router,
            expected="http://HOST:PORT of this machine",
        )
    key = api_key_for(config.rollout)
    if key is None:
        raise ConfigError(
            "the router needs the key of the rollout servers", where=f"environment variable {API_KEY_VARIABLE}"
        )
    if find_spec("smg") is None:
        raise ConfigError(
            "SGLang's router is not installed", expected="package smg", fix="pip install 'moe-trm[router]'"
        )
    from smg.launch_router import launch_router
    from smg.router_args import RouterArgs

    launch_router(
        RouterArgs(
            host=socket.gethostbyname(address.hostname),
            port=address.port,
            # Its own metrics, for this machine only.
            prometheus_host="127.0.0.1",
            prometheus_port=address.port + 1,
            api_key=key,
            # The others judge servers by speeds that they do not know yet: a whole batch may go to one of two.
            policy="round_robin",
            log_level="warn",
            # The controller watches the servers. One that lends its memory to the learner is healthy, and generates
            # nothing.
            disable_health_check=True,
            # Tokens come from us, and go back as tokens.
            disable_tokenizer_autoload=True,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
