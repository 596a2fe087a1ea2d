"""The rollout server's API key: from the configuration, else from the environment, never in one of our files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from moe_trm.config.schema import RolloutConfig
from moe_trm.errors import ConfigError

API_KEY_VARIABLE = "MOE_TRM_API_KEY"
_PLAIN = re.compile(r"""[^"'\\\s]+""")


def api_key_for(rollout: RolloutConfig) -> str | None:
    """`rollout.api_key`, else the environment variable MOE_TRM_API_KEY, else None: the run must make a key.

    Raises `ConfigError` for a key that HTTP headers or the server's own configuration would change. A key is also
    refused when the server's log would write it differently, because the log masks it.
    """
    key = rollout.api_key or os.environ.get(API_KEY_VARIABLE) or None
    if key is not None and not (key.isascii() and key.isprintable() and _PLAIN.fullmatch(key)):
        raise ConfigError(
            "the API key has characters that a key cannot have",
            where=f"config key rollout.api_key or environment variable {API_KEY_VARIABLE}",
            got="a secret",
            expected="printable ASCII without spaces, quotes and backslashes",
            fix="openssl rand -hex 32 makes one",
        )
    return key


def without_key(environment: Mapping[str, str]) -> dict[str, str]:
    """For processes that have no use for the key, or run what somebody else wrote."""
    return {name: value for name, value in environment.items() if name != API_KEY_VARIABLE}
