"""Environment variables of SGLang that are parsed when they change."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.variables import wrap

NAME = "MOE_TRM_TEST_OF_VARIABLES"


class Field:
    """SGLang's `EnvField` for a whole number, which counts how often it parses."""

    def __init__(self, default: Any = 3) -> None:
        self.name, self.default, self.parsed, self._set_to_none = NAME, default, 0, False

    def native(self) -> Any:
        self.parsed += 1
        text = os.getenv(self.name)
        if self._set_to_none:
            return None
        if text is None:
            return self.default() if callable(self.default) else self.default
        return int(text)

    get = wrap(native)


def test_every_change_is_seen_and_nothing_is_parsed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    field = Field()
    assert [field.get(), field.get(), field.parsed] == [3, 3, 1]
    monkeypatch.setenv(NAME, "5")
    assert [field.get(), field.get(), field.parsed] == [5, 5, 2]
    monkeypatch.setenv(NAME, "7")
    assert [field.get(), field.parsed] == [7, 3]
    monkeypatch.delenv(NAME)
    assert [field.get(), field.get(), field.parsed] == [3, 3, 4]
    field._set_to_none = True
    assert field.get() is None


def test_a_default_that_is_computed_is_asked_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([1, 2])
    field = Field(lambda: next(answers))
    assert [field.get(), field.get()] == [1, 2]
    monkeypatch.setenv(NAME, "5")
    assert [field.get(), field.get(), field.parsed] == [5, 5, 3]
