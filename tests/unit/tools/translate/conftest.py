"""What holds for every translation in a test of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from moe_trm.config.load import UNSET
from moe_trm.tools.translate import Draft, slime, trl, verl
from moe_trm.tools.translate.foreign_setting import ForeignSetting

ALTERNATIVES = {"task.eval_sets": "task.eval_prompts"}
"""Settings that stand in place of another, which stays open."""


@pytest.fixture(autouse=True)
def what_cannot_be_read_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting in turn cannot be read: all that it decides stays open, and is neither a default nor missing."""
    for module in (verl, slime, trl):
        monkeypatch.setattr(module, "translate", checked(module.translate))


def checked(translate: Any) -> Any:
    def run(settings: Mapping[str, ForeignSetting], *args: Any, **kwargs: Any) -> Draft:
        draft: Draft = translate(settings, *args, **kwargs)
        for key, setting in settings.items():
            unread = replace(setting, value=None, unread="the script computes it")
            found = translate({**settings, key: unread}, *args, **kwargs).values
            wrong = {
                ours: (draft.values.get(ours), found.get(ours))
                for ours in draft.values | found
                if found.get(ours) not in (draft.values.get(ours), UNSET)
                and found.get(ALTERNATIVES.get(ours, "")) != UNSET
            }
            assert not wrong, f"{key} cannot be read, and yet: {wrong}"
        return draft

    return run
