"""Every setting of a framework's own launch files is accounted for: the script that goes over a repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_trm.tools.translate import Draft
from tests.unit.tools.translate import public_files
from tests.unit.tools.translate.public_files import FILES, tally

SLIME = "python3 train.py --hf-checkpoint m --rollout-batch-size 8 --brand-new 1 --num-rollout ${NOT_SET}\n"
NEMO = "defaults: base.yaml\ngrpo: {num_prompts_per_step: 4}\n"
BASE = "loss_fn: {ratio_clip_min: 0.2}\npolicy: {model_name: m}\n"
TRL = "Text.\n```python\nargs = GRPOConfig(num_generations=4, epsilon=0.3, brand_new=1, output_dir=folder)\n```\n"
REPOSITORY = {
    "scripts/run-a.sh": SLIME,
    "scripts/run-nothing.sh": "echo hello\n",
    "scripts/models/a.sh": "MODEL_ARGS=(--num-layers 2)\n",
    "examples/configs/grpo_math_1B.yaml": NEMO,
    "examples/configs/base.yaml": BASE,
    "docs/grpo.md": TRL,
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in REPOSITORY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-15T12:00:00")
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    return tmp_path


def test_files_of_a_repository_are_counted(repository: Path) -> None:
    counts = tally("slime", repository, None)
    assert (counts.files, counts.unaccounted, dict(counts.unknown)) == (1, [], {"brand-new": 1})
    assert counts.translated >= 2
    assert counts.to_do >= 2
    nemo = tally("nemo-rl", repository, "2026-01-01")
    assert (nemo.files, nemo.unaccounted, nemo.refused) == (1, [], [])
    trl = tally("trl", repository, None)
    assert (trl.files, dict(trl.unknown)) == (1, {"brand_new": 1})


def test_files_that_did_not_change_since_are_left_out(repository: Path) -> None:
    assert tally("slime", repository, "2026-02-01").files == 0


def test_a_setting_in_no_list_is_a_failure(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["public_files", "slime", str(repository)]
    monkeypatch.setattr(sys, "argv", words)
    assert public_files.main() == 0
    monkeypatch.setattr(Draft, "accounted", lambda _draft, key: key != "brand-new")
    assert public_files.main() == 1
    assert "unaccounted for: brand-new in scripts/run-a.sh" in capsys.readouterr().out


def test_every_translator_has_files() -> None:
    from moe_trm.tools.translate.commands import _TRANSLATORS

    assert FILES.keys() == _TRANSLATORS.keys()
