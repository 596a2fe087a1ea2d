"""Where the key comes from, which keys are refused, and who does not get it."""

from __future__ import annotations

import base64
import random

import pytest

from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.rollout.credentials import API_KEY_VARIABLE, api_key_for, without_key


def config(key: str | None = None) -> Config:
    return Config.model_validate({"model": {"checkpoint": "m"}, "rollout": {"api_key": key}})


def test_the_configuration_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "theirs")
    assert api_key_for(config().rollout) == "theirs"
    assert api_key_for(config("ours").rollout) == "ours"
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    assert api_key_for(config().rollout) is None


def test_usual_keys_are_accepted() -> None:
    for key in ("a", "0f" * 32, base64.b64encode(random.Random(0).randbytes(33)).decode(), "sk-1_2.3~4/5+6=="):
        assert api_key_for(config(key).rollout) == key


@pytest.mark.parametrize("key", ['a"b', "a'b", "a\\b", "a b", "a\nb", "clé", "a\x7f", "\t"])
def test_keys_that_would_change_on_their_way_are_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="characters") as caught:
        api_key_for(config(key).rollout)
    assert key not in str(caught.value)


def test_processes_without_use_for_the_key_do_not_get_it() -> None:
    assert without_key({API_KEY_VARIABLE: "k", "HOME": "/"}) == {"HOME": "/"}
