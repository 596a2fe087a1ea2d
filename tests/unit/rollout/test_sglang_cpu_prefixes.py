"""The CPU support package keeps short requests out of SGLang's prefix cache, by SGLang's own mark, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.shared_prompts import AWAITED
from moe_trm_sglang_cpu.short_prefixes import MOST_TOKENS, checkpoint, release


def kept_out(num_tokens: int, **other: Any) -> list[bool]:
    """The mark of a request during both calls, which must leave it as it was."""
    marked = other.pop("marked", False)
    kv = SimpleNamespace(holds_kv=other.pop("holds_kv", True))
    tree = SimpleNamespace(supports_mamba=lambda: other.get("mamba", False))
    req = SimpleNamespace(
        skip_radix_cache_insert=marked,
        session=other.get("session"),
        extend_end=num_tokens,
        owned_kv_len=lambda: num_tokens,
        kv=kv,
        **{AWAITED: other.get(AWAITED, False)},
    )
    seen: list[bool] = []
    checkpoint(lambda req, tree: seen.append(req.skip_radix_cache_insert), req, tree)
    release(lambda req, tree, *, checkpoint: seen.append(req.skip_radix_cache_insert), req, tree, checkpoint=True)
    assert req.skip_radix_cache_insert is marked
    return seen


def test_only_short_requests_are_kept_out() -> None:
    assert kept_out(1) == kept_out(MOST_TOKENS) == [True, True]
    assert kept_out(MOST_TOKENS + 1) == [False, False]
    assert kept_out(MOST_TOKENS + 1, marked=True) == [True, True]


def test_a_session_and_a_state_that_the_tree_takes_over_are_not() -> None:
    assert kept_out(4, session="one") == [False, False]
    assert kept_out(4, mamba=True) == [False, False]


def test_a_prompt_that_others_wait_for_is_entered_and_the_answer_to_it_is_not() -> None:
    assert kept_out(4, **{AWAITED: True}) == [False, True]


def test_a_request_without_a_row_is_released_as_ever() -> None:
    assert kept_out(4, holds_kv=False)[1] is True


def test_what_fails_leaves_the_mark_as_it_was() -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no row")

    req = SimpleNamespace(skip_radix_cache_insert=False, session=None, extend_end=4)
    with pytest.raises(RuntimeError, match="no row"):
        checkpoint(fail, req, SimpleNamespace(supports_mamba=lambda: False))
    assert req.skip_radix_cache_insert is False
