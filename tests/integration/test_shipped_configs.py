"""Every shipped configuration runs two steps with the real engines, on a tiny model and the sizes of a laptop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.job import run_job
from tests.integration.engine_contract.conftest import skip_without
from tests.integration.jobs import metrics_of

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
SMALL = [
    "train.steps=2",
    "train.eval_every=0",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=16",
    "rollout.server.port=0",
    "rollout.server.max_total_tokens=8192",
    "rollout.server.max_running_requests=32",
    "learner.parallel={}",
]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_two_steps(config: Path, brief_checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"{a}+2=", "answer": f"#### {a + 2}"}) + "\n" for a in range(1, 8))
    )
    text = config.read_text(encoding="utf-8")
    skip_without("vllm" if "engine: vllm" in text else "")
    files = [f"task.prompts={prompts}"] if "prompts: " in text else []
    files += [f"task.eval_prompts={prompts}"] if "eval_prompts: " in text else []
    files += ["task.max_digits=1"] if "name: arithmetic" in text else []
    sizes = ["task.eval_size=4", f"run_dir={tmp_path}", f"model.checkpoint={brief_checkpoint}"]
    assert run_job(str(config), [*SMALL, *sizes, *files]) == 0
    rows = metrics_of(tmp_path / config.stem)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["replay/applied_fraction"] == 1.0 for row in rows[1:] if row.get("replay/token_layers"))
    assert all(row["ledger/issued"] > 0 for row in rows[1:])
