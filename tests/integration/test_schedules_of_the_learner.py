"""Schedules on the real learner and recorded rollouts: the same bits whenever groups arrive, and after a resumption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.short_run import metrics_of
from moe_trm.config import load
from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from tests.drills.resume_drill import books_balance
from tests.integration.recordings import make_recording
from tests.integration.resume_support import CONFIG, STEPS, forked

MEGATRON = ("learner.parallel.expert=1",)
STAGE_3 = ("learner.parallel.expert=1", "learner.backend=deepspeed", "learner.deepspeed.zero_stage=3")
ASYNC = ("pipeline.mode=async", "correction.rules=[]", "correction.preset=decoupled_token_is", "probe.every=0")
REUSE = ("pipeline.reuse_groups=1", "pipeline.max_uses=3")
AVERAGE = ("pipeline.proximal=average", "pipeline.proximal_decay=0.5")
EVERY = ("pipeline.push_every=2", "pipeline.max_staleness=3")
SCHEDULES: dict[str, tuple[tuple[str, ...], int, int]] = {
    "reuse": ((*ASYNC, *REUSE), 1, 1),
    "average": ((*ASYNC, *AVERAGE), 1, 1),
    "average in turn": (("pipeline.mode=sync", *AVERAGE, "probe.every=0"), 0, 1),
    "pushed every second step": ((*ASYNC, *EVERY), 1, 2),
    "everything": ((*ASYNC, *EVERY, *REUSE, *AVERAGE, "pipeline.stream=true"), 1, 2),
    "packed": ((*ASYNC, *REUSE, *AVERAGE, "pipeline.stream=true", "batch.layout=packed"), 1, 1),
}
"""Settings of a schedule, and the age and the pushes of the recording that it trains on."""
TIMING = ("time/", "ledger/in_flight", "ledger/queued", "ledger/issued", "queue/", "rollout/tokens_per_s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, a configuration, and recordings of its rollouts."""
    folder = tmp_path_factory.mktemp("schedules")
    make_checkpoint(folder / "start", shape=TinyShape(layers=2, hidden=32, experts=4, expert_ffn=16))
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder, steps=STEPS))
    for age, every in {(age, every) for _, age, every in SCHEDULES.values()}:
        make_recording(load(folder / "config.yaml", []), folder / f"bundle-{age}-{every}", STEPS, age=age, every=every)
    return folder


def rows(folder: Path, name: str, settings: Sequence[str], *, ranks: int, bundle: str) -> list[dict[str, float]]:
    """Metrics of a run, without what depends on when things happened."""
    done = forked(folder, name, f"rollout.bundle={folder / bundle}", *settings, ranks=ranks)
    assert done.ok, done.stderr
    found = metrics_of(folder / name)
    assert books_balance(found)
    return [{key: value for key, value in row.items() if not key.startswith(TIMING)} for row in found[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(("learner", "ranks"), [(MEGATRON, 1), (STAGE_3, 2)], ids=["megatron", "deepspeed-stage-3"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_run_has_the_same_bits(name: str, learner: Sequence[str], ranks: int, folder: Path) -> None:
    settings, age, every = SCHEDULES[name]
    label, bundle = f"{name.replace(' ', '-')}-{ranks}", f"bundle-{age}-{every}"
    alone = rows(folder, f"{label}-alone", [*settings, *learner], ranks=ranks, bundle=bundle)
    stopped = [f"train.steps={STEPS // 2 + 1}", *settings, *learner]
    rows(folder, f"{label}-stopped", stopped, ranks=ranks, bundle=bundle)
    longer = [*settings, *learner, "checkpoint.allow_changes=true"]
    again = rows(folder, f"{label}-stopped", longer, ranks=ranks, bundle=bundle)
    assert len(again) == len(alone) == STEPS
    pushed = {"weights/pushed"}  # the run that stops pushes its last weights for the evaluation
    for one, two in zip(alone, again, strict=True):
        assert {k: v for k, v in one.items() if k not in pushed} == {k: v for k, v in two.items() if k not in pushed}
    assert all(row["optimizer/grad_norm"] > 0 for row in alone)
    if "pipeline.reuse_groups=1" in settings:
        assert sum(row["reuse/groups"] for row in alone) > 0
        assert alone[-1]["ledger/reused"] > 0
    if "pipeline.push_every=2" in settings:
        assert [row["weights/pushed"] for row in alone] == [0, 2, 2, 4]


def test_a_step_that_trains_as_it_arrives_is_the_step_that_waited(folder: Path) -> None:
    """A probe step waits for its whole batch, scores it at once, and trains it then. The bits are the same."""
    settings = (*ASYNC, *REUSE, "pipeline.stream=true", "learner.parallel.expert=1")
    late = (*settings, "rollout.bundle_delay_s=0.2")
    arriving = rows(folder, "arriving", late, ranks=1, bundle="bundle-1-1")
    waiting = rows(folder, "waiting", (*settings, "probe.every=1"), ranks=1, bundle="bundle-1-1")
    assert all(row["optimizer/steps"] == 2 for row in arriving)
    for one, two in zip(arriving, waiting, strict=True):
        probed = {key for key in two if key not in one or key.startswith(("replay/", "routing/", "verdict"))}
        assert {key: value for key, value in one.items() if key in two and key not in probed} == {
            key: value for key, value in two.items() if key not in probed
        }
