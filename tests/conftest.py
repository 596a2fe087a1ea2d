"""Groups and order of tests on the workers of `make test`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

# The time of an example says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

GROUPS = {
    # Runs that sample from one running server.
    "integration/test_calculator.py::test_routes_and_log_probs": "tiny server",
    "integration/test_distributed_sync.py::test_a_run_that_pushes": "server of the briefly warmed model",
    "integration/test_distributed_sync.py": "tiny server",
    "integration/test_calculator.py": "server of the briefly warmed model",
    "integration/test_objectives.py": "server of the briefly warmed model",
    "integration/test_papers_train.py": "server of the briefly warmed model",
    "integration/test_doctor.py": "server of the briefly warmed model",
    "integration/test_fake_quantization.py": "server of the briefly warmed model",
    "integration/test_three_engines.py": "server of the briefly warmed model",
    "integration/test_lora_run.py": "server of the briefly warmed model",
    "integration/test_agent_rows.py": "server of the briefly warmed model",
    "integration/test_agent_pushes.py": "tiny server",
    "integration/test_agent_sessions.py": "tiny server",
    # Ranks that are forked from one process.
    "integration/test_lora.py": "tests/integration/test_learner_optimizer.py",
    "integration/test_lora_bases.py": "tests/integration/test_learner_optimizer.py",
    "integration/test_replay_columns.py": "tests/integration/test_replay_layouts.py",
    "integration/test_replay_fsdp.py": "tests/integration/test_replay_layouts.py",
    "integration/test_published_models.py": "tests/integration/test_replay_layouts.py",
    "integration/test_plan_memory.py": "tests/integration/test_replay_layouts.py",
    # Tests of a server itself.
    "integration/engine_contract/": "tiny server",
    "integration/test_rollout_server.py": "tiny server",
    "integration/test_interrupted_samples.py": "tiny server",
    "integration/test_retraction.py": "tiny server",
    "integration/test_sampling_mask_engine.py": "tiny server",
    "integration/test_sdk_examples.py": "tiny server",
    "integration/test_server_security.py": "tiny server",
    "integration/test_audit_server.py": "tiny server",
    "integration/test_several_servers.py": "tiny server",
    "integration/test_sglang_kernels.py": "tiny server",
    "integration/test_slow_keeper.py": "tiny server",
    "integration/test_use_proof.py": "tiny server",
}
"""Tests that share a running server, by the beginning of their names. All others go with those of their file."""
LONGEST_FIRST = (
    "tests/first_day/",
    "server of the briefly warmed model",
    "tiny server",
    "tests/integration/test_end_to_end.py",
    "tests/integration/test_learner_layouts.py",
    "tests/integration/test_resume.py",
    "tests/integration/test_async_run.py",
    "tests/integration/test_learner_conformance.py",
    "tests/integration/test_rehearsal.py",
    "tests/integration/",
    "tests/unit/rollout/",
    "tests/unit/runtime/functions/",
    "tests/",
)
"""A long group that begins last would leave the other workers without work."""


def group_of(name: str) -> str:
    """The group of the test with this node id."""
    found = [group for start, group in GROUPS.items() if name.startswith(f"tests/{start}")]
    return found[0] if found else name.split("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the groups that take longest first."""
    places: dict[str, int] = {}
    for item in items:
        group = group_of(item.nodeid)
        places[group] = next(place for place, start in enumerate(LONGEST_FIRST) if group.startswith(start))
    items.sort(key=lambda item: places[group_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers take one group after the other.

    pytest-xdist's own `loadgroup` needs node ids that pytest lets it rewrite.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)
