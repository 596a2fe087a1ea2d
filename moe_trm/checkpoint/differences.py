"""Settings that differ between two starts of one run, apart from those that do not change what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
from pydantic import ValidationError

from moe_trm.config.flat import as_yaml, different_keys, flatten
from moe_trm.config.schema import Config

ABSENT = "(absent)"
_FREE = (
    "name",
    "run_dir",
    "checkpoint.",
    "record.",
    "sync.",
    "observe.",
    "train.eval_every",
    "train.export",
    "train.max_restarts",
    "rollout.url",
    "rollout.router",
    "rollout.api_key",
    "rollout.intake_processes",
    *(
        f"rollout.server.{name}"
        for name in (
            "host",
            "port",
            "startup_timeout_s",
            "wait_s",
            "max_restarts",
            "silence_timeout_s",
            "hang_timeout_s",
        )
    ),
)
"""Settings of a run's place, of its processes, and of what it shows and leaves behind."""


class Change(msgspec.Struct, frozen=True):
    """A setting that is another one now."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {as_yaml(self.old)} -> {as_yaml(self.new)}"


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Every setting that differs, in the order of the configuration.

    A setting that an older version did not have counts with its default.
    """
    with suppress(ValidationError):  # a version that had other settings: they are compared as they are
        saved = Config.model_validate(saved).dump()
    before, after = flatten(saved), flatten(now)
    return [
        Change(key, before.get(key, ABSENT), after.get(key, ABSENT))
        for key in different_keys(before, after)
        if not key.startswith(_FREE)
    ]
