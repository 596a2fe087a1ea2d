"""Sessions of several rows from SGLang to the learner: two training steps, replayed, repeated and judged again."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from moe_trm.recording.bundle import BundleReader, joined
from moe_trm.report.session_tree import leaves
from moe_trm.types import RolloutRecord
from moe_trm.whatif.judge import Candidate, judge
from moe_trm.whatif.recording import load
from tests.integration.jobs import metrics_of, run_job, timeless, write_config

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


def test_every_branch_is_trained_once_with_its_own_proof(folder: Path) -> None:
    samples = check_steps(folder, "trajectory")
    assert all(len(sample.rows) == len(leaves(sample.session)) for sample in samples)
    assert max(len(sample.rows) for sample in samples) >= 3
    # The first row is the whole last branch; the others begin with what an earlier row has.
    assert all(sample.session[-1].row == 0 and sample.session[-1].parent == -1 for sample in samples)
    context = [row for sample in samples for row in sample.rows if row.turn_ids[row.sampled].min() > 0]
    assert context


def test_the_recorded_updates_are_judged_as_they_were_trained(folder: Path) -> None:
    """Also the mean over a sample's tokens, whose rows may be on two ranks."""
    recording, metrics = load(folder / "runs" / "trajectory"), metrics_of(folder / "runs" / "trajectory")
    config = recording.config
    found = judge(Candidate("as trained", config.correction, config.loss), config, recording.steps)
    assert found.steps is not None
    for step in (1, 2):
        for name in ("loss/policy", "correction/kept_fraction", "engine/k3_kl", "turns/engine_k3/1"):
            assert found.steps[step][name] == metrics[step][name], name


def test_transcripts_show_the_trees(folder: Path) -> None:
    page = (folder / "runs" / "trajectory" / "transcripts" / "step-000001.html").read_text()
    assert '<figure class="session">' in page
    assert re.search(f"Session of {ANSWERS} answers in [0-9] branches", page)


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
