"""Nothing of a step outlives it: what a real learner rank holds after each step, on recorded rollouts."""

from __future__ import annotations

import json

import pytest

from moe_trm.config import load
from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from tests.integration.ranks import fork_ranks
from tests.integration.recordings import make_recording

STEPS = 12
WARM = 6
"""After so many steps every code path has run, with its caches and imports."""
CONFIG = """
name: held
run_dir: {folder}
model: {{checkpoint: {folder}/start}}
task: {{max_digits: 1, eval_size: 0}}
rollout: {{engine: bundle, bundle: {folder}/bundle, prompts_per_step: 2, group_size: 4, top_k: 4}}
sampling_mask: {{mode: keep}}
replay: {{mode: R3, max_local_flip_rate: 1.0}}
probe: {{every: 2, thorough_every: 1}}
kl: {{coef: 0.01}}
loss: {{entropy_coef: 0.001}}
correction:
  calibration_steps: 3
  rules: [{{name: trm_max, target_reject_rate: 0.25}}]
learner: {{minibatches: 2, micro_batch_rows: 2}}
checkpoint: {{every: 2}}
observe: {{transcripts: 3}}
train: {{steps: {steps}, export: false}}
"""
OF_A_STEP = (
    "Tensor",
    "RouteRecord",
    "ReplayRecords",
    "ReplayPass",
    "Recorded",
    "RolloutRecord",
    "SamplingMask",
    "TrainRow",
    "TrainBatch",
    "BatchTable",
    "AnchoredMinibatch",
    "Evidence",
    "Transcript",
    "Future",
    "frame",
)


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """Living objects by type after each step."""
    folder = tmp_path_factory.mktemp("held")
    make_checkpoint(folder / "start", shape=TinyShape(layers=2, hidden=32, experts=4, expert_ffn=16))
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(folder=folder, steps=STEPS))
    make_recording(load(config, []), folder / "bundle", STEPS)
    counts = folder / "counts.jsonl"
    done = fork_ranks(["-m", "tests.integration.counting_rank", str(counts), str(config)], 1)
    assert done.ok, done.stdout + done.stderr
    return [json.loads(line)["objects"] for line in counts.read_text().splitlines()][1:]


@pytest.mark.parametrize("kind", OF_A_STEP)
def test_what_belongs_to_a_step_goes_with_it(census: list[dict[str, int]], kind: str) -> None:
    """Steps `n` and `n + 6` do the same: probes every second step, transcripts every third."""
    assert len(census) == STEPS
    assert census[-1].get(kind, 0) <= census[WARM - 1].get(kind, 0)


def test_the_rank_holds_no_more_objects(census: list[dict[str, int]]) -> None:
    """The verdicts remember the metrics of the last hundred steps: one mapping a step. Nothing else may be more."""
    gained = {kind: number - census[WARM - 1].get(kind, 0) for kind, number in census[-1].items()}
    assert sum(gained.values()) <= 3 * (STEPS - WARM), {kind: more for kind, more in gained.items() if more}
