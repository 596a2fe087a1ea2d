"""The rollout server's API key: from the configuration, else from the environment, never in a file of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping

from moe_trm.config.schema import Config

API_KEY_VARIABLE = "MOE_TRM_API_KEY"


def api_key_for(config: Config) -> str | None:
    """`rollout.api_key`, else the environment variable MOE_TRM_API_KEY, else None: this run has to make one."""
    return config.rollout.api_key or os.environ.get(API_KEY_VARIABLE) or None


def without_key(environment: Mapping[str, str]) -> dict[str, str]:
    """For processes that have no use for the key, or run what somebody else wrote."""
    return {name: value for name, value in environment.items() if name != API_KEY_VARIABLE}
