"""Three RL steps on real GSM8K prompts, through a byte-pair tokenizer trained on their text."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_trm.tools.quickstart.gsm8k import make_gsm8k_checkpoint
from tests.integration.jobs import metrics_of, run_job

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = REPOSITORY.parent / "shared" / "data" / "gsm8k"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="needs the GSM8K files in ../shared/data/gsm8k")
def test_three_steps(tmp_path: Path) -> None:
    make_gsm8k_checkpoint(DATA / "train.jsonl", tmp_path / "checkpoint")
    overrides = [
        f"model.checkpoint={tmp_path / 'checkpoint'}",
        f"task.prompts={DATA / 'train.jsonl'}",
        f"task.eval_prompts={DATA / 'test.jsonl'}",
        f"run_dir={tmp_path / 'runs'}",
        "rollout.server.port=0",
    ]
    assert run_job(str(REPOSITORY / "configs" / "gsm8k.yaml"), overrides) == 0
    rows = metrics_of(tmp_path / "runs" / "gsm8k")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["replay/applied_fraction"] == 1.0
        assert row["replay/token_layers"] > 0
        assert row["ledger/trained"] + row["ledger/rejected"] == row["ledger/issued"] == 32 * row["step"]
        assert row["update/first_nonzero_fraction"] == 0.0
