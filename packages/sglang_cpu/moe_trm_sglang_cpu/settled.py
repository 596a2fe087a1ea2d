"""Requests that have ended leave their batch before anything but tokens is asked of the scheduler.

SGLang sends an answer, looks for messages, and only then takes the request out of its batch. Who has the answer may
already ask it to release its memory or to flush its cache: it would refuse, or end, since it were not idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_trm_sglang_cpu.layer_matrices import FOR_TOKENS


def settle_before(scheduler: Any, requests: Sequence[Any]) -> None:
    """The beginning of the next pass, ahead of it where one of these requests is not for tokens."""
    if scheduler.enable_overlap or all(type(request).__name__ in FOR_TOKENS for request in requests):
        return
    for batch in (scheduler.last_batch, scheduler.running_batch):
        if batch is not None and any(req.finished() for req in batch.reqs):
            batch.filter_batch()
            scheduler.running_batch.batch_is_full = False
