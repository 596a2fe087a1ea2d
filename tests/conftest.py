"""Which tests go together on one worker, and in which order: `make test` runs two workers."""

from __future__ import annotations

import pytest

SHARED_SERVERS = ("attached", "rollout_server")
"""Fixtures that start a server for many files: its tests stay together."""
LONGEST_FIRST = (
    "attached",
    "test_end_to_end",
    "test_resume",
    "test_doctor",
    "rollout_server",
    "test_async_run",
    "test_learner_conformance",
    "test_learner_layouts",
    "test_learner_megatron",
)
"""Groups that take longest. A long one begun last would leave the other worker idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test a group, its shared server's or its file's, and put the longest groups first and unit tests last."""
    order: dict[pytest.Item, tuple[int, bool]] = {}
    for item in items:
        shared = [name for name in SHARED_SERVERS if name in getattr(item, "fixturenames", ())]
        group = shared[0] if shared else item.path.stem if "integration" in item.path.parts else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
        place = LONGEST_FIRST.index(group) if group in LONGEST_FIRST else len(LONGEST_FIRST)
        order[item] = place, "integration" not in item.path.parts
    items.sort(key=order.__getitem__)
