"""A prompt that several waiting requests have is computed for one of them; the others take it from the cache.

SGLang computes every waiting request at once. The samples of a group wait together, so each computes the prompt of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

HELD = "moe_trm_held"
"""Attribute of a request that has waited for another one. None waits twice."""
AWAITED = "moe_trm_awaited"
"""Attribute of a request for whose prompt others have waited."""
WORTH_A_PASS = 128
"""Tokens that are not computed again, from which on another pass is worth its time."""


def wrap(native: Callable[..., Any], scheduler: Any, *arguments: Any, **options: Any) -> Any:
    """SGLang's `Scheduler._get_new_batch_prefill_raw`, which is `native`, without the requests that better wait."""
    queue = scheduler.waiting_queue
    later = to_hold(queue, scheduler.tree_cache) if len(queue) > 1 and scheduler.chunked_req is None else []
    if not later:
        return native(scheduler, *arguments, **options)
    held = {id(req) for req in later}
    scheduler.waiting_queue = [req for req in queue if id(req) not in held]
    found = native(scheduler, *arguments, **options)
    if found[0] is None:
        scheduler.waiting_queue = queue
        return found
    for req in later:
        setattr(req, HELD, True)
    scheduler.waiting_queue = [*scheduler.waiting_queue, *later]
    return found


def to_hold(queue: Sequence[Any], cache: Any) -> list[Any]:
    """The waiting requests whose prompts another one computes first; none where that saves too few tokens."""
    if getattr(cache, "disable", True) or cache.supports_mamba():
        return []
    groups = defaultdict(list)
    for req in queue:
        if _may_share(req):
            prompt = bytes(memoryview(req.origin_input_ids))
            groups[prompt, req.extra_key, req.cache_salt, req.lora_id].append(req)
    firsts: list[Any] = []
    later: list[Any] = []
    saved = 0
    for first, *others in groups.values():
        if others:
            # Its place in the cache, which SGLang looks up again when it takes the request.
            first.init_next_round_input(cache)
            length = len(first.origin_input_ids)
            missing = min(req._compute_max_prefix_len(length) for req in others) - first.prefix_len
            saved += max(missing, 0) * len(others)
            if missing > 0:
                firsts.append(first)
                later += others
    if saved < WORTH_A_PASS:
        return []
    for first in firsts:
        setattr(first, AWAITED, True)
    return later


def _may_share(req: Any) -> bool:
    return not (
        getattr(req, HELD, False)
        or req.skip_radix_cache_insert
        or req.output_ids
        or req.session is not None
        or req.multimodal_inputs is not None
        or req.input_embeds is not None
        or req.positional_embed_overrides is not None
        or req.beam_group is not None
        or req.token_indices_to_pool is not None
    )
