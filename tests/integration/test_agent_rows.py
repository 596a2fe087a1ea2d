"""Sessions of several rows from SGLang to the learner: two training steps, replayed, repeated and judged again."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from moe_trm.observe.report.session_tree import leaves
from moe_trm.recording.bundle import BundleReader, BundleWriter, joined
from moe_trm.recording.scores import ScoresReader
from moe_trm.tools.whatif.judge import Candidate, judge
from moe_trm.tools.whatif.recording import load
from moe_trm.types import RolloutRecord
from tests.integration.jobs import metrics_of, run_job, timeless, write_config
from tests.integration.objective_support.cases import REWARD, doctored, stale

AGENT = """
import aiohttp

async def run(base_url, api_key, prompt):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        async def complete(text, limit):
            body = {"model": "policy", "prompt": text, "max_tokens": limit}
            async with client.post(f"{base_url}/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return text + answer["choices"][0]["text"]

        first = await complete(prompt.text, 4)
        await complete(first + "+1=", 5)
        second = await complete(first + "[7]", 6)
        await complete(second + "=", 4)
        # The last answer begins anew, and is what the reward reads.
        await complete(prompt.text, 16)
"""
ANSWERS = 5


def settings_of(folder: Path, rows: str, attached: list[str]) -> list[str]:
    (folder / "agent.py").write_text(AGENT)
    return [
        *attached,
        *(f"rollout.agent={folder / 'agent.py'}:run", f"agent.rows={rows}", "rollout.max_tokens=96"),
        *("loss.aggregation=seq-mean-token-mean", f"record.bundle={folder / rows}", f"name={rows}"),
        "correction.rules=[{name: trm_max, thresholds: {max_kl: 0.5}}, {name: token_tis, "
        "thresholds: {tokens: post_tool, cap: 2.0}}]",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, brief_checkpoint: Path, attached: list[str]) -> Path:
    """Two recorded steps with a row for each branch."""
    made = tmp_path_factory.mktemp("agent_rows")
    assert run_job(write_config(made, brief_checkpoint), settings_of(made, "trajectory", attached)) == 0
    return made


def check_steps(folder: Path, rows: str) -> list[RolloutRecord]:
    """The books and proofs of both steps; the recorded samples."""
    metrics = metrics_of(folder / "runs" / rows)
    for step, row in enumerate(metrics[1:], 1):
        assert row["replay/applied_fraction"] == 1.0
        assert row["update/first_nonzero_fraction"] == 0.0
        # The learner's log-probs are the engine's, row by row and turn by turn.
        assert row["engine/k3_kl"] < 1e-9
        for turn in range(3):
            assert 0 <= row[f"turns/engine_k3/{turn}"] < 1e-9
        places = ("queued", "in_flight", "trained", "rejected", "dropped")
        assert row["ledger/issued"] == sum(row[f"ledger/{place}"] for place in places) >= 16 * step
        assert row["turns/mean"] == ANSWERS
        assert row["agent/left_out_tokens"] == 0
        assert row["agent/rows"] > row["ledger/trained"]
    samples = [sample for step in (1, 2) for sample in joined(BundleReader(str(folder / rows)).read(step)).values()]
    for sample in samples:
        assert len(sample.session) == ANSWERS
        for number, answer in enumerate(sample.rows):
            own = [turn for turn in sample.session if turn.row == number]
            assert answer.num_sampled == sum(turn.sampled for turn in own)
            assert answer.routes is not None
            answer.routes.check_tokens(answer.tokens, answer.origin)
        assert all(turn.row >= 0 for turn in sample.session)
    assert metrics[-1]["ledger/trained"] == len(samples)
    assert metrics[-1]["agent/rows"] >= sum(len(sample.rows) for sample in samples)
    return samples


@pytest.mark.long
def test_every_branch_is_trained_once_with_its_own_proof(folder: Path) -> None:
    samples = check_steps(folder, "trajectory")
    assert all(len(sample.rows) == len(leaves(sample.session)) for sample in samples)
    assert max(len(sample.rows) for sample in samples) >= 3
    # The first row is the whole last branch; the others begin with what an earlier row has.
    assert all(sample.session[-1].row == 0 and sample.session[-1].parent == -1 for sample in samples)
    context = [row for sample in samples for row in sample.rows if row.turn_ids[row.sampled].min() > 0]
    assert context


@pytest.mark.long
def test_the_recorded_updates_are_judged_as_they_were_trained(folder: Path) -> None:
    """Also the mean over a sample's tokens, whose rows may be on two ranks."""
    recording, metrics = load(folder / "runs" / "trajectory"), metrics_of(folder / "runs" / "trajectory")
    config = recording.config
    found = judge(Candidate("as trained", config.correction, config.loss), config, recording.steps)
    assert found.steps is not None
    for step in (1, 2):
        for name in ("loss/policy", "correction/kept_fraction", "engine/k3_kl", "turns/engine_k3/1"):
            assert found.steps[step][name] == metrics[step][name], name


@pytest.mark.long
def test_transcripts_show_the_trees(folder: Path) -> None:
    page = (folder / "runs" / "trajectory" / "transcripts" / "step-000001.html").read_text()
    assert '<figure class="session">' in page
    assert re.search(f"Session of {ANSWERS} answers in [0-9] branches", page)


BOUND, LOW, HIGH, CAP = 0.5, 0.98, 1.02, 1.05
BY_TURN = (
    f"correction.rules=[{{name: trm_max, thresholds: {{max_kl: {BOUND}, scope: turn}}}}, {{name: geometric_mask, "
    f"thresholds: {{ratio: engine, low: {LOW}, high: {HIGH}, scope: turn}}}}, "
    f"{{name: seq_tis, thresholds: {{ratio: merged, cap: {CAP}, scope: turn}}}}]"
)
MODES = ("R3", pytest.param("R2", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def stale_bundle(folder: Path) -> Path:
    """The recording as that of an engine that is off in single turns, whose second step is of the first weights."""
    reader, writer = BundleReader(str(folder / "trajectory")), BundleWriter(str(folder / "stale"))
    for step in reader.steps():
        writer.write(step, [stale(doctored(row)) for row in reader.read(step)])
    return folder / "stale"


def run_by_turn(folder: Path, bundle: Path, mode: str, attached: list[str], *layout: str) -> list[dict[str, float]]:
    name = f"{mode}-{len(layout)}"
    own = [*settings_of(folder, "trajectory", attached), "rollout.engine=bundle", f"rollout.bundle={bundle}"]
    own += [BY_TURN, f"record.bundle={folder / name}", f"name={name}", f"replay.mode={mode}", "pipeline.push_every=2"]
    more = ["optimizer.lr=1e-5", "optimizer.warmup_steps=0", "learner.parallel.expert=1", "probe.every=0"]
    assert run_job(str(folder / "config.yaml"), [*own, *REWARD, *more, *layout]) == 0
    return timeless(metrics_of(folder / "runs" / name))[1:]


@pytest.fixture(scope="module", params=MODES)
def in_two_slices(
    request: pytest.FixtureRequest, folder: Path, stale_bundle: Path, attached: list[str]
) -> tuple[str, list[dict[str, float]]]:
    """Two steps with rules by turn on packs whose rows are shared by two ranks."""
    layout = ["learner.parallel.context=2", "batch.layout=packed"]
    return request.param, run_by_turn(folder, stale_bundle, request.param, attached, *layout)


@pytest.mark.long
def test_rules_by_turn_are_a_loop_over_the_turns_of_stale_rows(
    in_two_slices: tuple[str, list[dict[str, float]]], folder: Path
) -> None:
    mode, rows = in_two_slices
    for step, row in enumerate(rows, 1):
        turns, tokens = list[tuple[bool, bool]](), list[bool]()
        for batch in (batch for update in ScoresReader(folder / f"{mode}-2").read(step) for batch in update.batches):
            anchor = batch.current_logprobs if batch.anchor_logprobs is None else batch.anchor_logprobs
            behavior = anchor if batch.behavior_logprobs is None else batch.behavior_logprobs
            for number in range(len(batch.mask)):
                for turn in batch.turn_ids[number][batch.mask[number]].unique():
                    own = batch.mask[number] & (batch.turn_ids[number] == turn)
                    rollout = batch.rollout_logprobs[number][own]
                    total = (batch.current_logprobs[number][own] - rollout).tolist()
                    engine = (behavior[number][own] - rollout).tolist()
                    worst = max(gap * gap / 2 for gap in total) <= BOUND
                    mean = LOW <= math.exp(sum(engine) / len(engine)) <= HIGH
                    turns.append((worst, mean))
                    tokens += [worst and mean] * len(total)
        for rule, kept in zip(("trm_max", "geometric_mask"), zip(*turns, strict=True), strict=True):
            share = row[f"correction/{rule}/kept_turn_fraction"]
            assert share == pytest.approx(sum(kept) / len(kept), abs=1e-9), (rule, step)
            assert 0 < share < 1
            assert row[f"correction/{rule}/kept_sequence_fraction"] < share, (
                "one bad turn costs its row, not the others"
            )
        assert row["correction/kept_fraction"] == pytest.approx(sum(tokens) / len(tokens), abs=1e-9)
        assert row["rollout/age_max"] == step - 1
        assert row["replay/applied_fraction"] == 1.0


@pytest.mark.slow
def test_rules_by_turn_are_those_of_one_process(
    in_two_slices: tuple[str, list[dict[str, float]]], folder: Path, stale_bundle: Path, attached: list[str]
) -> None:
    mode, rows = in_two_slices
    for got, expected in zip(rows, run_by_turn(folder, stale_bundle, mode, attached), strict=True):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            if key.startswith(("correction/", "optimizer/", "loss/", "turns/")):
                assert got[key] == pytest.approx(value, rel=1e-4, abs=2e-6), key


@pytest.mark.slow
def test_the_run_repeats_from_its_recording(folder: Path, attached: list[str]) -> None:
    again = ["rollout.engine=bundle", f"rollout.bundle={folder / 'trajectory'}", "record.bundle=null"]
    own = [*settings_of(folder, "trajectory", attached), *again, "name=again"]
    assert run_job(str(folder / "config.yaml"), own) == 0
    runs = (timeless(metrics_of(folder / "runs" / name)) for name in ("trajectory", "again"))
    for one, two in zip(*(rows[1:] for rows in runs), strict=True):
        for key in (
            "reward/mean",
            "engine/k3_kl",
            "loss/policy",
            "optimizer/grad_norm",
            "turns/mean",
            "turns/rows_mean",
        ):
            assert one[key] == two[key]


@pytest.mark.slow
def test_every_answer_is_a_row_with_its_own_proof(folder: Path, attached: list[str]) -> None:
    """In packs, so that rows of several samples share one row of a micro-batch."""
    own = [*settings_of(folder, "turns", attached), "batch.layout=packed"]
    assert run_job(str(folder / "config.yaml"), own) == 0
    samples = check_steps(folder, "turns")
    assert {len(sample.rows) for sample in samples} == {ANSWERS}
    for sample in samples:
        for row in sample.rows:
            assert len(np.unique(row.turn_ids[row.sampled])) == 1
