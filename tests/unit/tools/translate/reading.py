"""Translations of settings that a test writes down."""

from __future__ import annotations

from typing import Any

from moe_trm.tools.translate import Draft, slime, verl
from moe_trm.tools.translate.foreign_setting import ForeignSetting

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def of_verl(settings: dict[str, Any]) -> Draft:
    """The translation of resolved verl settings, by dotted key."""
    known = {"actor_rollout_ref.model.path": "models/moe", **settings}
    return verl.translate({key: ForeignSetting(key, value, "test", str(value)) for key, value in known.items()})


def of_slime(line: str, framework: str = "slime") -> Draft:
    """The translation of an argument list."""
    read: dict[str, list[str]] = {"hf-checkpoint": ["models/moe"]}
    for word in line.split():
        if word.startswith("--"):
            read[word[2:]] = []
        else:
            read[list(read)[-1]].append(word)
    settings = {key: ForeignSetting(key, tuple(words), "test", " ".join(words)) for key, words in read.items()}
    return slime.translate(settings, framework)
