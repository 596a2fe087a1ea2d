"""A whole run whose sampling overlaps training, on the real engines: bounded age, interrupted samples, and the decomposition apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.job import run_job
from tests.integration.jobs import metrics_of, timeless, write_config

STEPS = 4
TIMING = ("ledger/", "queue/", "rollout/reissued", "rollout/recoveries", "rollout/servers", "eval/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("async")


@pytest.fixture(scope="module")
def config(folder: Path, brief_checkpoint: Path) -> Path:
    return write_config(folder, brief_checkpoint)


@pytest.fixture(scope="module")
def live(folder: Path, config: Path) -> list[dict[str, float]]:
    overrides = [
        "pipeline.mode=async",
        "pipeline.max_staleness=1",
        "pipeline.partial=interrupt",
        f"train.steps={STEPS}",
    ]
    overrides += ["learner.parallel.expert=1", "probe.every=0", f"record.bundle={folder / 'bundle'}"]
    assert run_job(str(config), overrides) == 0
    return metrics_of(folder / "runs" / "live")[1:]


def test_samples_are_stale_but_never_beyond_the_bound_and_the_books_balance(live: list[dict[str, float]]) -> None:
    assert len(live) == STEPS
    assert live[0]["rollout/age_max"] == 0
    assert any(row["rollout/stale_tokens"] > 0 for row in live[1:])
    for row in live:
        assert row["rollout/age_max"] <= 1
        places = ("queued", "in_flight", "trained", "rejected", "dropped")
        assert row["ledger/issued"] == sum(row[f"ledger/{place}"] for place in places)
    assert live[-1]["ledger/in_flight"] == live[-1]["ledger/queued"] == 0


def test_engine_mismatch_and_lag_are_known_apart_and_replay_is_complete(live: list[dict[str, float]]) -> None:
    """Behaviour log-probs come from a pass under the weights that sampled: the engine ratio is as small as without any lag."""
    for row in live:
        assert row["update/first_nonzero_fraction"] == 0.0
        assert row["replay/applied_fraction"] == 1.0
        assert str(row["pipeline/behavior"]) == "snapshot"
    stale = [row["engine/k3_kl"] for row in live if row["rollout/stale_tokens"]]
    assert max(stale) < 10 * live[0]["engine/k3_kl"] + 1e-4


def test_a_recorded_overlapping_run_repeats_bit_for_bit(
    live: list[dict[str, float]], folder: Path, config: Path
) -> None:
    """Groups are trained in the order of issue, whatever arrives first; only when things happened differs."""
    overrides = ["name=again", "pipeline.mode=async", "pipeline.max_staleness=1", f"train.steps={STEPS}"]
    overrides += [
        "learner.parallel.expert=1",
        "probe.every=0",
        "rollout.engine=bundle",
        f"rollout.bundle={folder / 'bundle'}",
    ]
    assert run_job(str(config), overrides) == 0
    again = metrics_of(folder / "runs" / "again")[1:]
    for one, two in zip(timeless(live), timeless(again), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(TIMING)} == {
            k: v for k, v in two.items() if not k.startswith(TIMING)
        }
