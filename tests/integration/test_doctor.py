"""The doctor on a real server and learner: a healthy configuration passes, a recording with a planted fault fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.faults import Change, planted_checkpoint
from moe_trm.cli import main
from tests.integration.jobs import write_config

SMALL = ["learner.parallel={}", "task.eval_size=0"]


@pytest.fixture(scope="module", params=["attached", pytest.param("its own server", marks=pytest.mark.slow)])
def visit(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    brief_checkpoint: Path,
    attached: list[str],
) -> tuple[Path, int]:
    """A folder with the recording of a visit of a healthy configuration, and the doctor's exit code."""
    folder = tmp_path_factory.mktemp("doctor")
    config = write_config(folder, brief_checkpoint)
    own = attached if request.param == "attached" else ["rollout.server.dtype=float32"]
    words = ["doctor", str(config), *SMALL, *own, "--keep", str(folder / "probe")]
    return folder, main([*words, "--json", str(folder / "doctor.json")])


@pytest.mark.long
def test_a_healthy_configuration_passes(visit: tuple[Path, int]) -> None:
    folder, code = visit
    found = json.loads((folder / "doctor.json").read_text())
    status = {check["name"]: check["status"] for check in found["checks"]}
    assert (code, found["healthy"], found["cause"]["cause"]) == (0, True, "none")
    assert {status[name] for name in ("real requests", "weight push", "replay", "tokenizer", "sampling mask")} == {"ok"}
    assert found["cause"]["figures"]["replayed_k3"] < 1e-9


@pytest.mark.slow
def test_a_planted_fault_fails_and_is_named(
    visit: tuple[Path, int], brief_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = visit
    change: Change = lambda tensors, _config, _seed: tensors.update(  # noqa: E731
        {name: 1.5 * value for name, value in tensors.items() if name == "lm_head.weight"}
    )
    learner = planted_checkpoint(brief_checkpoint, tmp_path / "planted", change, 0)
    recorded = json.dumps({"name": "jsonl", "prompts": str(folder / "probe" / "prompts.jsonl"), "reward": "exact"})
    words = ["rollout.engine=bundle", f"rollout.bundle={folder / 'probe' / 'bundle'}", f"task={recorded}"]
    words += [
        "rollout.prompts_per_step=16",
        "rollout.group_size=8",
        f"model.checkpoint={learner}",
        f"run_dir={tmp_path}",
    ]
    assert main(["doctor", str(folder / "config.yaml"), "learner.parallel={}", *words]) == 1
    # Logits scaled up by half are those of a lower temperature.
    assert "FAIL   cause: temperature: The learner scores at a lower temperature" in capsys.readouterr().out


def test_what_needs_no_engine(brief_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = planted_checkpoint(brief_checkpoint, tmp_path / "broken", None, 0)
    (broken / "tokenizer.json").unlink()
    config = write_config(tmp_path, broken)
    assert main(["doctor", str(config), "--no-probe"]) == 1
    said = capsys.readouterr().out
    assert "FAIL   tokenizer" in said
    assert "zero-update probe: something above has to be repaired first" in said
