"""Checkpoints load in the installed environment with plain transformers, without any call of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_trm.models.tiny.families import make_family

PROGRAM = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
prompt = tokenizer("1+1=", return_tensors="pt")
answer = model.generate(**prompt, max_new_tokens=4, do_sample=False, eos_token_id=None)
print("tokens", answer.shape[1] - prompt["input_ids"].shape[1])
"""


@pytest.mark.long
def test_a_checkpoint_loads_and_generates_in_a_fresh_process(tmp_path: Path) -> None:
    checkpoint = make_family("qwen3_moe", tmp_path / "checkpoint")
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(checkpoint)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tokens 4" in done.stdout
