"""The page of model families says what the last run found."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import families, models
from moe_trm.models.registry import MOE_FAMILIES
from tests.published_models import NAMES

STOPPED = """Traceback (most recent call last):
  File "loop.py", line 1, in train
ReplayProofError: layer 2: 58% of the sets differ | bound 30%
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
FOUND = json.loads(models.FOUND.read_text(encoding="utf-8"))
PROOFS = json.loads(models.FOUND_PROOFS.read_text(encoding="utf-8"))
RELEASED = json.loads(models.FOUND_RELEASES.read_text(encoding="utf-8"))


def test_the_page_is_what_the_last_run_wrote() -> None:
    assert models.PAGE.read_text(encoding="utf-8") == models.page(FOUND, RELEASED, PROOFS), (
        "run `python -m benchmarks.models --page-only`"
    )


def test_every_moe_family_of_transformers_is_in_the_table() -> None:
    assert list(PROOFS) == list(families.moe_families()), "run `python -m benchmarks.families` for the new ones"
    assert sum(not proof["step"] for proof in PROOFS.values()) >= 24
    assert all(proof["problem"] for proof in PROOFS.values() if proof["step"])


def test_every_cell_of_every_family_is_yes_or_has_its_reason() -> None:
    assert tuple(FOUND) == MOE_FAMILIES
    for engines in FOUND.values():
        for engine in ("sglang", *models.LEARNERS):
            checks = models.CHECKS["sglang" if engine == "sglang" else "learner"]
            assert all(engines[engine][check] for check in checks)


def test_published_models_are_in_the_table_in_order() -> None:
    assert tuple(RELEASED) == tuple(name for name in NAMES if name in RELEASED)
    for engines in RELEASED.values():
        assert all(engines["sglang"][check] for check in models.CHECKS["sglang"])
        assert all(engines[learner]["convert"] for learner in models.LEARNERS)


def test_the_learner_that_failed_is_named_in_its_cell() -> None:
    yes = dict.fromkeys(models.CHECKS["release"], "yes")
    engines = {"sglang": {"serve": "yes", "sync": "yes"}, "megatron": yes, "deepspeed": {**yes, "mask": "too far"}}
    row = models.release_lines({"deepseek_v3": engines})[-1]
    assert row == "| deepseek_v3 | fp8 + MTP | yes | yes | yes | yes | yes | yes | deepspeed: too far |"


def test_a_learner_that_refuses_the_family_is_left_out_of_its_cells() -> None:
    yes, refused = (dict.fromkeys(models.CHECKS["release"], said) for said in ("yes", "refused: no such layers"))
    engines = {"sglang": {"serve": "yes", "sync": "yes"}, "megatron": refused, "deepspeed": yes}
    row = models.release_lines({"qwen3_next_80b_a3b": engines})[-1]
    assert row == f"| qwen3_next_80b_a3b | bf16 | yes | yes | {' | '.join(['yes (deepspeed only)'] * 5)} |"


def test_what_both_learners_lack_is_said_once() -> None:
    lacking = {"convert": "yes", "published form": "yes"} | dict.fromkeys(
        ("replay R2", "replay R3", "mask"), "no samples"
    )
    engines = {"sglang": dict.fromkeys(models.CHECKS["sglang"], "an assertion"), "megatron": lacking}
    row = models.release_lines({"moonlight_16b_a3b": {**engines, "deepspeed": lacking}})[-1]
    sampled = " | ".join(["no samples"] * 3)
    assert row == f"| moonlight_16b_a3b | bf16 | an assertion | an assertion | yes | yes | {sampled} |"


def test_a_reason_is_numbered_once_and_said_below() -> None:
    cells = dict.fromkeys(models.CHECKS["learner"], "yes")
    found = {
        "one": {"sglang": dict.fromkeys(models.CHECKS["sglang"], "it fell over"), "megatron": cells, "deepspeed": cells}
    }
    page = models.page(found, {}, {})
    assert "| one | SGLang | no (1) | - | - | no (1) | no (1) | no (1) |" in page
    assert "\n1. it fell over\n" in page
    assert "| one | Megatron-Core | - | yes | yes | yes | yes | yes |" in page


@pytest.mark.parametrize("sampled", [True, False])
def test_what_stopped_a_run_is_the_reason_in_its_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    said = STOPPED if sampled else "\n".join(f"[rank0]: {line}" for line in STOPPED.splitlines())
    monkeypatch.setattr(models, "_run", lambda command: subprocess.CompletedProcess(command, 2, "", said))
    # The folder is there before the server is.
    (tmp_path / "bundle").mkdir()
    if sampled:
        (tmp_path / "bundle" / "step-000001.safetensors").touch()
    reason = "ReplayProofError: layer 2: 58% of the sets differ / bound 30%"
    found = models._live(tmp_path / "config.yaml", tmp_path)
    assert found == {"serve": "yes" if sampled else reason, "replay R3": reason, "mask": reason, "sync": reason}
