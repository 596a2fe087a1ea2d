"""A checkpoint folder that is not there, with advice for one that is a name of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_trm.errors import CheckpointError
from moe_trm.models.hf_config import read_full_config


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Qwen/Qwen3-30B-A3B", "hf download Qwen/Qwen3-30B-A3B --local-dir checkpoints/Qwen3-30B-A3B"),
        ("./Qwen/Qwen3", "Check model.checkpoint."),
        ("/models/none", "Check model.checkpoint."),
        ("none", "Check model.checkpoint."),
    ],
)
def test_advice(name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        read_full_config(name)
    assert advice in str(refused.value)
    assert ("hf download" in str(refused.value)) == ("hf download" in advice)
