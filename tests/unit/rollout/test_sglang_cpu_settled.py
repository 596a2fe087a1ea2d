"""Requests that have ended leave their batch before the scheduler is asked anything but tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.settled import settle_before


class Batch(SimpleNamespace):
    """SGLang's `ScheduleBatch`, of requests that are True once they have ended."""

    def __init__(self, *ended: bool) -> None:
        super().__init__(reqs=[SimpleNamespace(finished=lambda end=end: end) for end in ended], batch_is_full=True)

    def filter_batch(self) -> None:
        self.reqs = [req for req in self.reqs if not req.finished()]


def left(running: Batch, last: Batch | None, *names: str, overlap: bool = False) -> tuple[int, int, bool]:
    """Requests of both batches after these messages, and whether the running one still counts as full."""
    scheduler: Any = SimpleNamespace(running_batch=running, last_batch=last, enable_overlap=overlap)
    settle_before(scheduler, [type(name, (), {})() for name in names])
    return len(running.reqs), len(last.reqs) if last is not None else 0, running.batch_is_full


def test_requests_that_have_ended_leave_both_batches() -> None:
    assert left(Batch(True, False), Batch(True), "ReleaseMemoryOccupationReqInput") == (1, 0, False)
    assert left(Batch(True), None, "TokenizedGenerateReqInput", "FlushCacheReqInput") == (0, 0, False)


def test_nothing_is_done_for_tokens_alone_where_nobody_has_ended_and_with_overlap() -> None:
    assert left(Batch(True), Batch(True), "TokenizedGenerateReqInput") == (1, 1, True)
    assert left(Batch(True), Batch(True)) == (1, 1, True)
    assert left(Batch(False), Batch(False), "FlushCacheReqInput") == (1, 1, True)
    assert left(Batch(True), Batch(True), "FlushCacheReqInput", overlap=True) == (1, 1, True)
