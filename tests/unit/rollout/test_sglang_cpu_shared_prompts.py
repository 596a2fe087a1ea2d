"""Waiting requests with the prompt of another one: who waits, who never does, and that none waits twice."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.shared_prompts import AWAITED, HELD, WORTH_A_PASS, to_hold, wrap

LONG = WORTH_A_PASS


class Request(SimpleNamespace):
    """The part of SGLang's `Req` that is read. `cached`: tokens of its prompt that the cache has."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def init_next_round_input(self, cache: Any) -> None:
        self.prefix_len = self.cached

    def _compute_max_prefix_len(self, length: int) -> int:
        return min(length - 1, self.most_cached)


def request(prompt: int, length: int = LONG, **other: Any) -> Request:
    plain = dict.fromkeys(("extra_key", "cache_salt", "lora_id", "session", "multimodal_inputs", "input_embeds"))
    plain |= dict.fromkeys(("positional_embed_overrides", "beam_group", "token_indices_to_pool"))
    fields = {**plain, "skip_radix_cache_insert": False, "output_ids": array("q"), "cached": 0, "most_cached": length}
    return Request(**{**fields, **other}, origin_input_ids=array("q", [prompt] * length))


def cache(disable: bool = False, mamba: bool = False) -> Any:
    return SimpleNamespace(disable=disable, supports_mamba=lambda: mamba)


def test_one_request_of_each_prompt_goes_first() -> None:
    queue = [request(1), request(2), request(1), request(1), request(2), request(3)]
    assert [queue.index(req) for req in to_hold(queue, cache())] == [2, 3, 4]
    assert [queue.index(req) for req in queue if hasattr(req, AWAITED)] == [0, 1]


@pytest.mark.parametrize(
    "other",
    [
        {"extra_key": "another"},
        {"cache_salt": "another"},
        {"lora_id": "another"},
        {"skip_radix_cache_insert": True},
        {"output_ids": array("q", [5])},
        {"session": "some"},
        {"multimodal_inputs": "some"},
        {"input_embeds": "some"},
        {HELD: True},
    ],
)
def test_a_request_that_could_not_take_the_prompt_does_not_wait(other: dict[str, Any]) -> None:
    assert to_hold([request(1), request(1, **other)], cache()) == []


def test_nobody_waits_for_what_is_cached_not_cacheable_or_short() -> None:
    assert to_hold([request(1, cached=LONG - 1), request(1, cached=LONG - 1)], cache()) == []
    assert to_hold([request(1), request(1, most_cached=0)], cache()) == []
    few = [request(1, 20), request(1, 20)]
    assert to_hold(few, cache()) == []
    assert not any(hasattr(req, AWAITED) for req in few)
    assert len(to_hold([request(1, 20) for _ in range(30)], cache())) == 29
    assert to_hold([request(1, 2 * LONG)] * 2, cache(disable=True)) == []
    assert to_hold([request(1, 2 * LONG)] * 2, cache(mamba=True)) == []


def scheduler(queue: list[Request], **other: Any) -> Any:
    return SimpleNamespace(**{"waiting_queue": queue, "tree_cache": cache(), "chunked_req": None, **other})


def test_those_who_wait_are_behind_the_others_and_go_with_the_next_pass() -> None:
    queue = [request(1, 2 * LONG), request(1, 2 * LONG), request(2), request(2, cached=5)]
    waiting = scheduler(list(queue))
    seen = []

    def native(asked: Any, *rest: Any) -> tuple[Any, Any]:
        """Takes the first request of the queue."""
        seen.append([queue.index(req) for req in asked.waiting_queue])
        asked.waiting_queue = asked.waiting_queue[1:]
        return "a batch", rest

    assert wrap(native, waiting, "delayer", "running") == ("a batch", ("delayer", "running"))
    assert [queue.index(req) for req in waiting.waiting_queue] == [2, 1, 3]
    wrap(native, waiting)
    wrap(native, waiting)
    assert seen == [[0, 2], [2, 1, 3], [1, 3]]
    assert [queue.index(req) for req in waiting.waiting_queue] == [3]


def test_without_a_batch_the_queue_stays_and_nobody_has_waited() -> None:
    queue = [request(1, 2 * LONG) for _ in range(3)]
    waiting = scheduler(queue)
    assert wrap(lambda *_: (None, "running"), waiting) == (None, "running")
    assert waiting.waiting_queue == queue
    assert not any(hasattr(req, HELD) for req in queue)


def test_a_prompt_in_pieces_is_gone_on_with_first() -> None:
    waiting = scheduler([request(1, 2 * LONG) for _ in range(3)], chunked_req="one")
    assert wrap(lambda asked, *_: len(asked.waiting_queue), waiting) == 3
