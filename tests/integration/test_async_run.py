"""A whole run on the real engines whose sampling overlaps training: age, interrupted samples, decomposition."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from launch.job import free_port, run_job
from moe_trm.config import load, resolve
from moe_trm.observe.prometheus import gauge_name
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.tools.plan.modes import Mode
from moe_trm.tools.plan.simulate import SimulatedServers, simulate
from tests.integration.jobs import metrics_of, timeless, write_config
from tests.integration.jobs import run_job as run_forked

pytestmark = pytest.mark.long  # the tests of schedules and of the engine's contract hold its rules

STEPS = 4
PLACES = ("queued", "in_flight", "trained", "rejected", "dropped")
RULES = "[{name: trm_max, thresholds: {max_kl: 6.0e-4}}]"
"""Between fresh rows (at most 3e-4 here) and most stale ones. A threshold that is calibrated on fresh rows lies among
them, where rounding decides: packs and padded rows differ in their last bits."""
KEY = "a-key-that-nobody-else-has-7f3b"
WATCHED = {
    "time/learner_idle_share",
    "time/rollout_idle_share",
    "time/push_s",
    "queue/groups",
    "queue/age/0",
    "queue/age/1",
    "rollout/age_mean",
    "rollout/age_max",
    "rollout/age_share/0",
    "rollout/age_share/1",
    "rollout/stale_tokens",
    "rollout/mixed_rows",
    "rollout/reissued",
    "rollout/recoveries",
    "rollout/servers",
    "rollout/servers_lost",
    "rollout/losses",
    "rollout/lost_s",
    "weights/decode_gap",
    "weights/learner_gap",
    "weights/proof_s",
    "rollout/retracted",
    "records/dropped/age",
}
"""The metrics that docs/pipeline.md names."""
TIMING = ("ledger/", "queue/", "eval/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("async")


@pytest.fixture(scope="module")
def config(folder: Path, brief_checkpoint: Path) -> Path:
    path = write_config(folder, brief_checkpoint)
    path.write_text(path.read_text().replace("rollout:\n", f"rollout:\n  api_key: {KEY}\n", 1))
    return path


@dataclass
class Seen:
    """Of a run, from outside, while it ran.

    Attributes:
        processes: command lines, and whether the environment has the key.
        scraped: the last page that Prometheus would have got.
    """

    processes: dict[str, bool] = field(default_factory=dict)
    scraped: str = ""


@contextmanager
def watching(seen: Seen, port: int) -> Iterator[None]:
    """Look at all processes that this one starts, and at the metrics on `port`, inside the `with`."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    seen.processes[" ".join(child.cmdline())] = KEY in child.environ().values()
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
                seen.scraped = page.read().decode()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def live(folder: Path, config: Path, seen: Seen) -> list[dict[str, float]]:
    overrides = [
        "pipeline.mode=async",
        "pipeline.max_staleness=1",
        "pipeline.partial=interrupt",
        f"train.steps={STEPS}",
    ]
    overrides += ["learner.parallel.expert=1", "probe.every=0", f"record.bundle={folder / 'bundle'}"]
    overrides += ["observe.transcripts=1", "observe.sinks=[tensorboard]", "checkpoint.every=2"]
    port = free_port()
    with watching(seen, port):
        assert run_job(str(config), [*overrides, f"observe.prometheus_port={port}"]) == 0
    return metrics_of(folder / "runs" / "live")[1:]


def test_samples_are_stale_but_never_beyond_the_bound_and_the_books_balance(live: list[dict[str, float]]) -> None:
    assert len(live) == STEPS
    assert live[0]["rollout/age_max"] == 0
    assert any(row["rollout/stale_tokens"] > 0 for row in live[1:])
    for row in live:
        assert row["rollout/age_max"] <= 1
        assert row["ledger/issued"] == sum(row[f"ledger/{place}"] for place in PLACES)
    assert live[-1]["ledger/in_flight"] == live[-1]["ledger/queued"] == 0


def test_every_step_has_what_there_is_to_watch(live: list[dict[str, float]], seen: Seen) -> None:
    for row in live:
        assert row.keys() >= WATCHED
        assert row["rollout/age_share/0"] + row["rollout/age_share/1"] == pytest.approx(1)
        assert row["queue/age/0"] + row["queue/age/1"] == row["queue/groups"]
    names = {line.split(" ")[0] for line in seen.scraped.splitlines()}
    assert names >= {gauge_name(name) for name in WATCHED}


def test_the_key_is_in_no_file_and_on_no_command_line(live: list[dict[str, float]], folder: Path, seen: Seen) -> None:
    files = [path for root in ("runs", "bundle") for path in (folder / root).rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert names >= {
        "config.json",
        "choices.json",
        "metrics.jsonl",
        "report.html",
        "rollout.log",
        "controller.log",
        "manifest.json",
    }
    assert [path.name for path in files if KEY.encode() in path.read_bytes()] == []
    assert [line for line in seen.processes if KEY in line] == []
    # Ranks find the key in their environment; what they start has no use for it there.
    for program in ("sglang.launch_server", "moe_trm.rollout.service"):
        assert {known for line, known in seen.processes.items() if program in line} == {False}
    assert {known for line, known in seen.processes.items() if "launch.train" in line} == {True}


def test_engine_mismatch_and_lag_are_known_apart_and_replay_is_complete(live: list[dict[str, float]]) -> None:
    """A pass under the weights that sampled gives behaviour log-probs: the engine ratio is as small as without lag."""
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
    assert run_forked(config, overrides) == 0
    again = metrics_of(folder / "runs" / "again")[1:]
    for one, two in zip(timeless(live), timeless(again), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(TIMING)} == {
            k: v for k, v in two.items() if not k.startswith(TIMING)
        }


def test_packs_of_stale_samples_some_of_them_dropped_train_as_padded_rows(
    live: list[dict[str, float]], folder: Path, config: Path
) -> None:
    runs = {}
    for layout in ("padded", "packed"):
        overrides = [f"name={layout}", f"batch.layout={layout}", "pipeline.mode=async", "pipeline.max_staleness=1"]
        overrides += [f"train.steps={STEPS}", "learner.parallel.expert=1", "probe.every=0", "rollout.engine=bundle"]
        overrides += [f"rollout.bundle={folder / 'bundle'}", f"correction.rules={RULES}"]
        assert run_forked(config, overrides) == 0
        runs[layout] = timeless(metrics_of(folder / "runs" / layout)[1:])
    for padded, packed in zip(runs["padded"], runs["packed"], strict=True):
        assert packed["batch/padding_fraction"] == 0.0 < padded["batch/padding_fraction"]
        same = {key for key in padded if not key.startswith((*TIMING, "batch/"))}
        assert same <= packed.keys()
        for key in same:
            if isinstance(padded[key], str) or key.endswith("kept_fraction"):
                assert packed[key] == padded[key], key
            else:
                # The certificate is made of the largest log-ratio, squared.
                rel = 1e-2 if key.startswith("trm/") else 1e-3
                assert packed[key] == pytest.approx(padded[key], rel=rel, abs=1e-5), key
    assert any(row["rollout/stale_tokens"] for row in runs["packed"])
    assert any(0 < row["correction/kept_fraction"] < 1 for row in runs["packed"])


@pytest.fixture(scope="module")
def server(config: Path, folder: Path) -> Iterator[Server]:
    running = start_server(Served.of(load(config)), folder / "shared.log", KEY)
    yield running
    running.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "eta", "partial"),
    [("one_step", 1, "wait"), ("async", 0, "wait"), ("async", 0, "interrupt"), ("async", 3, "interrupt")],
)
def test_every_mode_keeps_its_bound_and_ends(
    mode: str, eta: int, partial: str, server: Server, config: Path, folder: Path
) -> None:
    overrides = [f"pipeline.mode={mode}", f"pipeline.max_staleness={eta}", f"pipeline.partial={partial}"]
    overrides += [f"name={mode}-{eta}-{partial}", f"rollout.url={server.url}", f"train.steps={STEPS}"]
    assert run_forked(config, [*overrides, "learner.parallel.expert=1", "probe.every=0"]) == 0
    rows = metrics_of(folder / "runs" / f"{mode}-{eta}-{partial}")[1:]
    assert len(rows) == STEPS
    assert max(row["rollout/age_max"] for row in rows) <= eta
    assert any(row["rollout/stale_tokens"] > 0 for row in rows) is (eta > 0)
    for row in rows:
        assert row["ledger/issued"] == sum(row[f"ledger/{place}"] for place in PLACES)
    assert rows[-1]["ledger/in_flight"] == rows[-1]["ledger/queued"] == 0


SCHEDULES = {
    "sync-every-2": ["pipeline.push_every=2"],
    "periodic-2": ["pipeline.mode=periodic", "pipeline.push_every=2"],
    "one-step-every-2": ["pipeline.mode=one_step", "pipeline.push_every=2"],
    "streamed": ["pipeline.stream=true"],
    "everything": [
        "pipeline.mode=async",
        "pipeline.push_every=2",
        "pipeline.stream=true",
        "pipeline.reuse_groups=2",
        "pipeline.proximal=average",
        "pipeline.partial=interrupt",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_and_has_the_ages_of_the_simulation(
    name: str, server: Server, config: Path, folder: Path
) -> None:
    """Ages do not depend on seconds where a push waits for samples and the next samples wait for the push."""
    overrides = [*SCHEDULES[name], f"name={name}", f"rollout.url={server.url}", f"train.steps={STEPS}"]
    overrides += ["learner.parallel.expert=1", "probe.every=0", "correction.rules=[]"]
    overrides += ["correction.preset=decoupled_token_is"]
    assert run_forked(config, overrides) == 0
    rows = metrics_of(folder / "runs" / name)[1:]
    pipeline = resolve(config, overrides).config
    assert len(rows) == STEPS
    for row in rows:
        assert row["rollout/age_max"] <= pipeline.pipeline.staleness_limit
        assert row["ledger/issued"] == sum(row[f"ledger/{place}"] for place in PLACES)
        assert math.isfinite(row["optimizer/grad_norm"])
    assert any(row["optimizer/grad_norm"] > 0 for row in rows)
    assert rows[-1]["ledger/in_flight"] == rows[-1]["ledger/queued"] == 0
    every = pipeline.pipeline.push_every
    assert [row["weights/pushed"] for row in rows] == [
        step if step == STEPS else step // every * every for step in range(1, STEPS + 1)
    ]
    if name == "everything":
        assert sum(row["reuse/groups"] for row in rows) > 0
        return
    fleet = SimulatedServers(1, 1000, lambda _n: 1.0, push_s=0.1)
    found = simulate(
        [[3] * 16] * STEPS, 7.0, fleet, Mode.of(pipeline.pipeline, pipeline.learner.minibatches).schedule(sends=False)
    )
    ages = [{step - version for version in versions} for step, versions in enumerate(found.versions)]
    shares = [{age for age in range(4) if row.get(f"rollout/age_share/{age}", 0) > 0} for row in rows]
    assert shares == ages
